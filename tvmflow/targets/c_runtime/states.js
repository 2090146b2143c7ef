  /**
   * Compute the next step from the inputs that are not states, with states that stay in the model.
   *
   * @param {Object<string, TypedArray>} values These inputs by name, in C order.
   * @returns {Object<string, TypedArray>} The outputs that are not states, by name.
   */
  step(values) {
    this.#updateLength();
    const [inputs, outputs] = %(steps)s;
    const results = this.#call(
      "step", values, inputs.map((place) => this.inputs[place]), outputs.map((place) => this.outputs[place]));
    this.#updateLength();
    return results;
  }

  /** Start again: growing states are empty, the others 0, or what the model begins with. */
  reset() {
    this.#change("reset");
  }

  /** The length of the growing states, such as the tokens in a KV cache; 0 where none grows. */
  get length() {
    return Number(this.#exports.%(name)s_length(this.#context));
  }

  /** The rows that `drop` has taken since the beginning: the next position of a token is this plus `length`. */
  get dropped() {
    return Number(this.#exports.%(name)s_dropped(this.#context));
  }

  /** Drop everything after a length of the growing states. */
  truncate(length) {
    this.#change("truncate", BigInt(length));
  }

  /** Drop this many of the oldest rows of the growing states. */
  drop(count) {
    this.#change("drop", BigInt(count));
  }

  /**
   * Save all states with a checksum, for `loadState` of any library of this model.
   *
   * @returns {Uint8Array}
   */
  saveState() {
    this.#change("state_bytes", this.#scratch);
    const bytes = this.#view().getUint32(this.#scratch, true);
    const start = this.#allocate(bytes);
    this.#change("save_state", start, bytes);
    const saved = new Uint8Array(this.#exports.memory.buffer, start, bytes).slice();
    this.#exports.free(start);
    return saved;
  }

  /** Go on from what `saveState` returned. What is damaged, or of another model, is refused and changes nothing. */
  loadState(saved) {
    const start = this.#allocate(saved.length);
    try {
      new Uint8Array(this.#exports.memory.buffer, start, saved.length).set(saved);
      this.#change("load_state", start, saved.length);
    } finally {
      this.#exports.free(start);
    }
  }

  #change(name, ...values) {
    if (!this.#context) throw new Error("the model was destroyed");
    this.#check(this.#exports[`%(name)s_${name}`](this.#context, ...values));
    this.#updateLength();
  }

  /* Let the dimension that is the length of the states follow it. */
  #updateLength() {
    const place = %(length)s;
    if (place !== null) this.setDimensions({ [this.dimensions[place].name]: this.length });
  }


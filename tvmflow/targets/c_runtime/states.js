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

  /** The values of a state, by the name of its input. */
  state(name) {
    const place = %(states)s.findIndex((input) => this.inputs[input].name === name);
    if (place < 0) throw new TypeError(`the model has no state ${name}`);
    this.#change("state", place, this.#scratch, this.#scratch + 4);
    const [data, bytes] = [0, 4].map((at) => this.#view().getUint32(this.#scratch + at, true));
    const type = ARRAYS[this.inputs[%(states)s[place]].dtype];
    return new type(this.#exports.memory.buffer, data, bytes / type.BYTES_PER_ELEMENT).slice();
  }

  /** Another model with the same weights and states. */
  fork() {
    const copy = new Model(this.#exports);
    this.#exports.%(name)s_destroy(copy.#context);
    this.#change("fork", this.#scratch);
    copy.#context = this.#view().getUint32(this.#scratch, true);
    if (this.dimensions) copy.setDimensions(Object.fromEntries(this.dimensions.map(({ name, size }) => [name, size])));
    return copy;
  }

  /**
   * Choose a token by its logits, after the penalty for `recent` tokens. With all 0, it is the one of the largest logit.
   *
   * @param {Float32Array} logits
   * @param {{temperature?: number, topK?: number, topP?: number, repetitionPenalty?: number}} sampling
   * @param {number[]} recent
   * @returns {number}
   */
  sample(logits, { temperature = 0, topK = 0, topP = 0, repetitionPenalty = 0 } = {}, recent = []) {
    const end = 24 + 8 * recent.length;
    const start = this.#allocate(end + 4 * logits.length);
    try {
      const view = this.#view();
      [temperature, topK, topP, repetitionPenalty].forEach((value, place) =>
        view[place === 1 ? "setUint32" : "setFloat32"](start + 8 + 4 * place, value, true));
      recent.forEach((token, place) => view.setBigInt64(start + 24 + 8 * place, BigInt(token), true));
      new Float32Array(this.#exports.memory.buffer, start + end, logits.length).set(logits);
      this.#change("sample", start + end, logits.length, start + 8, start + 24, recent.length, start);
      return Number(this.#view().getBigInt64(start, true));
    } finally {
      this.#exports.free(start);
    }
  }

  /** Set the random state of `sample`, which is saved, forked and reset with the states. */
  seed(seed) {
    this.#change("seed", BigInt(seed));
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



 *
 * `dimensions` are the sizes that each call chooses: name, min, max, multipleOf and size, the smallest at first. After
 * `setDimensions`, the shapes in `inputs` and `outputs` are those of the next calls.//----
    this.dimensions = this.#describeDimensions();
    this.#measure();
//----
  /**
   * Choose the sizes of dimensions for the next calls.
   *
   * @param {Object<string, number>} sizes The sizes by name; other dimensions keep theirs.
   */
  setDimensions(sizes) {
    if (!this.#context) throw new Error("the model was destroyed");
    const chosen = Object.entries(sizes).map(([name, size]) => {
      const place = this.dimensions.findIndex((dimension) => dimension.name === name);
      if (place < 0) throw new TypeError(`the model has no dimension ${name}`);
      const { min, max, multipleOf } = this.dimensions[place];
      if (!Number.isInteger(size) || size < min || size > max || size %% multipleOf)
        throw new RangeError(`the dimension ${name} is ${size}, and its sizes are ${min} to ${max}${multipleOf > 1 ? `, multiples of ${multipleOf}` : ""}`);
      return [place, size];
    });
    for (const [place, size] of chosen) {
      this.#check(this.#exports.%(name)s_set_dimension(this.#context, place, BigInt(size)));
      this.dimensions[place].size = size;
    }
    this.#measure();
  }

  /* Read %(name)s_dimension[], which ends with a dimension without a name. */
  #describeDimensions() {
    const view = this.#view();
    const dimensions = [];
    for (let address = this.#exports.%(name)s_dimensions(); view.getUint32(address, true); address += 32) {
      const [min, max, multipleOf] = [8, 16, 24].map((at) => Number(view.getBigInt64(address + at, true)));
      dimensions.push({ name: this.#text(view.getUint32(address, true)), min, max, multipleOf, size: min });
    }
    return dimensions;
  }

  /* Give all tensors the shapes and bytes of the next call. */
  #measure() {
    const rank = Math.max(0, ...[...this.inputs, ...this.outputs].map((tensor) => tensor.shape.length));
    const start = this.#allocate(8 * rank + 8);
    for (const direction of ["input", "output"]) {
      this[`${direction}s`].forEach((tensor, index) => {
        this.#check(this.#exports[`%(name)s_${direction}_shape`](this.#context, index, start + 8));
        this.#check(this.#exports[`%(name)s_${direction}_bytes`](this.#context, index, start));
        const view = this.#view();
        tensor.bytes = view.getUint32(start, true);
        tensor.shape = tensor.shape.map((_, axis) => Number(view.getBigInt64(start + 8 + 8 * axis, true)));
      });
    }
    this.#exports.free(start);
  }


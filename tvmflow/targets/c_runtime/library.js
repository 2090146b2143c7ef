/* %(title)s, for browsers and Node.
 *
%(tensors)s
 *
 *   import { load } from "./%(file)s";
 *   const model = await load();
 *   const outputs = model.run({ name: values, ... }); // typed arrays by name
 */
/** The arrays of JavaScript for the elements of tensors. */
export const ARRAYS = {
  bool: Uint8Array,
  uint8: Uint8Array,
  int8: Int8Array,
  uint16: Uint16Array,
  int16: Int16Array,
  float16: Uint16Array, // the bits of each number
  bfloat16: Uint16Array,
  uint32: Uint32Array,
  int32: Int32Array,
  float32: Float32Array,
  uint64: BigUint64Array,
  int64: BigInt64Array,
  float64: Float64Array,
};
const ALIGNMENT = 64;

/**
 * Load the model.
 *
 * @param {string | URL | BufferSource | WebAssembly.Module} source The module; by default the file beside this one.
 * @returns {Promise<Model>}
 */
export async function load(source = new URL("%(module)s", import.meta.url)) {
  let memory;
  const clock_time_get = (clock, precision, address) => {
    const nanoseconds = BigInt(Math.round(performance.now() * 1e6));
    new DataView(memory.buffer).setBigUint64(address, nanoseconds, true);
    return 0;
  };
  const imports = { wasi_snapshot_preview1: { clock_time_get } };
  const { exports } = await WebAssembly.instantiate(await compile(source), imports);
  memory = exports.memory;
  exports._initialize();
  return new Model(exports);
}

async function compile(source) {
  if (source instanceof WebAssembly.Module) return source;
  if (source instanceof ArrayBuffer || ArrayBuffer.isView(source)) return WebAssembly.compile(source);
  const url = new URL(source, import.meta.url);
  if (url.protocol === "file:") {
    const { readFile } = await import("node:fs/promises");
    return WebAssembly.compile(await readFile(url));
  }
  const response = await fetch(url);
  if (!response.ok) throw new Error(`${url}: ${response.status} ${response.statusText}`);
  return WebAssembly.compile(await response.arrayBuffer());
}

/**
 * A loaded model. `inputs` and `outputs` describe its tensors: name, dtype and shape. An output with a `boundedAxis` has a
 * size along that axis that is known after a call, and at most that of its shape.%(dimensions_title)s
 */
export class Model {
  #exports;
  #context;
  #memory = new Map(); // tensor -> its memory
  #scratch;

  constructor(exports) {
    this.#exports = exports;
    const result = this.#allocate(4);
    this.#check(exports.%(name)s_create(0, result));
    this.#context = this.#view().getUint32(result, true);
    this.inputs = this.#describe(exports.%(name)s_inputs());
    this.outputs = this.#describe(exports.%(name)s_outputs()).map((tensor, index) => {
      const boundedAxis = exports.%(name)s_bounded_axis(index);
      return boundedAxis < 0 ? tensor : { ...tensor, boundedAxis };
    });
%(dimensions_read)s    // for a shape, or the buffers of a call
    const tensors = [...this.inputs, ...this.outputs];
    this.#scratch = this.#allocate(8 * Math.max(tensors.length, ...tensors.map((tensor) => tensor.shape.length)));
  }

  /**
   * Compute the outputs.
   *
   * @param {Object<string, TypedArray>} values The inputs by name, in C order.
   * @returns {Object<string, TypedArray>} The outputs by name, of the sizes that they have in this call.
   */
  run(values) {
    return this.#call("run", values, this.inputs, this.outputs);
  }

  /* Call a function that takes some inputs and computes some outputs. */
  #call(name, values, inputs, outputs) {
    if (!this.#context) throw new Error("the model was destroyed");
    const unknown = Object.keys(values).filter((name) => !inputs.some((tensor) => tensor.name === name));
    if (unknown.length) throw new TypeError(`the model has no input ${unknown.join(", ")}`);
    [...inputs, ...outputs].forEach((tensor, index) => {
      const data = this.#place(tensor);
      this.#view().setUint32(this.#scratch + 8 * index, data, true);
      this.#view().setUint32(this.#scratch + 8 * index + 4, tensor.bytes, true);
    });
    inputs.forEach((tensor) => {
      const array = this.#array(tensor);
      const given = values[tensor.name];
      if (given?.constructor !== array.constructor || given.length !== array.length)
        throw new TypeError(`input ${tensor.name} must be a ${array.constructor.name} of ${array.length} elements`);
      array.set(given);
    });
    const after = this.#scratch + 8 * inputs.length;
    this.#check(
      this.#exports[`%(name)s_${name}`](this.#context, this.#scratch, inputs.length, after, outputs.length));
    return Object.fromEntries(
      outputs.map((tensor) => {
        const array = this.#array(tensor);
        return [tensor.name, array.slice(0, this.#count(tensor, array.length))];
      }));
  }

%(dimensions_methods)s%(states_methods)s  /** Free the model's memory. */
  destroy() {
    this.#exports.%(name)s_destroy(this.#context);
    this.#context = 0;
    [this.#scratch, ...Array.from(this.#memory.values(), ({ start }) => start)].forEach(this.#exports.free);
    this.#memory.clear();
    this.#scratch = 0;
  }

  /* The memory may have moved since the last call into the module. */
  #view() {
    return new DataView(this.#exports.memory.buffer);
  }

  #array(tensor) {
    const type = ARRAYS[tensor.dtype];
    return new type(this.#exports.memory.buffer, this.#place(tensor), tensor.bytes / type.BYTES_PER_ELEMENT);
  }

  /* How many of an output's values count after a call: the first ones. */
  #count(tensor, values) {
    const axis = tensor.boundedAxis;
    if (axis === undefined || !values) return values;
    this.#check(this.#exports.%(name)s_output_shape(this.#context, this.outputs.indexOf(tensor), this.#scratch));
    const size = Number(this.#view().getBigInt64(this.#scratch + 8 * axis, true));
    return (values / tensor.shape[axis]) * size;
  }

  #allocate(bytes) {
    const address = this.#exports.malloc(bytes + ALIGNMENT);
    if (!address) throw new RangeError(`there is no memory for ${bytes} bytes`);
    return address;
  }

  #check(status) {
    if (status) throw new Error(this.#text(this.#exports.%(name)s_message(status)));
  }

  #text(address) {
    const bytes = new Uint8Array(this.#exports.memory.buffer, address);
    return new TextDecoder().decode(bytes.slice(0, bytes.indexOf(0)));
  }

  /* Read %(name)s_tensor[], which ends with a tensor without a name. */
  #describe(address) {
    const view = this.#view();
    const tensors = [];
    for (; view.getUint32(address, true); address += 20) {
      const [name, dtype, shape, rank, bytes] = [0, 4, 8, 12, 16].map((at) => view.getUint32(address + at, true));
      const sizes = Array.from({ length: rank }, (_, axis) => Number(view.getBigInt64(shape + 8 * axis, true)));
      tensors.push({ name: this.#text(name), dtype: this.#text(dtype), shape: sizes, bytes });
    }
    return tensors;
  }

  /* Return the address of a tensor, in its memory of earlier calls where that is large enough. */
  #place(tensor) {
    const memory = this.#memory.get(tensor);
    if (memory?.bytes >= tensor.bytes) return memory.data;
    if (memory) this.#exports.free(memory.start);
    this.#memory.delete(tensor);
    const start = this.#allocate(tensor.bytes);
    const data = Math.ceil(start / ALIGNMENT) * ALIGNMENT;
    this.#memory.set(tensor, { start, data, bytes: tensor.bytes });
    return data;
  }
}

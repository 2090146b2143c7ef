/* Models of tvmflow in browsers and Node: what chooses how a model runs, and runs it. */
import { preprocess, readPixels } from "./images.js";
import { ARRAYS } from "./wasm.js";

export { ARRAYS };

const BEST = 5;

/** An error with a code for programs: `fetch`, `no-webgpu`, `no-adapter`, `limit`, `kernel`, `memory`, `lost`, `destroyed`. */
export class ModelError extends Error {
  constructor(code, message, options) {
    super(message, options);
    this.name = "ModelError";
    this.code = code;
  }
}

/**
 * Fetch a file of the package. It must be the one that was built with this module; its digest is in its address, so that
 * it can be cached for ever.
 *
 * @param {{url: URL, sha256: string, bytes: number}} file
 * @param {{fetch?: typeof fetch, onprogress?: function}} options
 * @returns {Promise<Uint8Array>}
 */
export async function fetchFile({ url, sha256, bytes }, { fetch = globalThis.fetch, onprogress } = {}) {
  if (url.protocol === "file:" && typeof process === "object") {
    const { readFile } = await import(/* webpackIgnore: true */ /* @vite-ignore */ "node:fs/promises");
    return readFile(url);
  }
  const address = new URL(url);
  if (/^https?:$/.test(address.protocol)) address.search = sha256.slice(0, 16);
  const digest = Uint8Array.from(sha256.match(/../g), (byte) => parseInt(byte, 16));
  const subtle = globalThis.crypto?.subtle;
  // where pages compute no digests, the browser checks it, and tells of no progress until then
  const options = subtle ? {} : { integrity: `sha256-${btoa(String.fromCharCode(...digest))}` };
  try {
    const response = await fetch(address, options);
    if (!response.ok) throw new Error(`${response.status} ${response.statusText}`);
    const content = await read(response, bytes, onprogress);
    if (subtle) {
      const found = new Uint8Array(await subtle.digest("SHA-256", content));
      if (found.some((byte, place) => byte !== digest[place])) throw new Error("its SHA-256 is another one");
    }
    return content;
  } catch (error) {
    throw new ModelError(
      "fetch",
      `${url.pathname.split("/").pop()} cannot be fetched, or is not the file that was built with this module: ${error.message}`,
      { cause: error });
  }
}

async function read(response, bytes, onprogress) {
  if (!onprogress) return new Uint8Array(await response.arrayBuffer());
  const content = new Uint8Array(bytes);
  const reader = response.body.getReader();
  let loaded = 0;
  for (let piece = await reader.read(); !piece.done; piece = await reader.read()) {
    content.set(piece.value, loaded);
    loaded += piece.value.length;
    onprogress({ loaded, total: bytes });
  }
  if (loaded < bytes) throw new Error(`it has ${loaded} bytes, not ${bytes}`);
  return content;
}

/**
 * Load a model.
 *
 * @param {object} description Its inputs, outputs, images and labels.
 * @param {Object<string, {url: URL, sha256: string, bytes: number}>} files
 * @param {Object<string, function>} backends A function that imports the module of each backend, the best one first.
 * @param {object} options See the types of the package.
 * @returns {Promise<Model>}
 */
export async function openModel(description, files, backends, options = {}) {
  const { backend = "auto" } = options;
  if (backend !== "auto" && !Object.hasOwn(backends, backend))
    throw new TypeError(`there is no backend ${backend} (there are auto, ${Object.keys(backends).join(", ")})`);
  const names = backend === "auto" ? Object.keys(backends) : [backend];
  const reasons = [];
  for (const name of names) {
    try {
      const { open } = await backends[name]();
      return new Model(description, name, await open(files, description, options), reasons);
    } catch (error) {
      // what another backend would not do better is reported as it is
      if (name === names.at(-1) || !(error instanceof ModelError) || error.code === "fetch") throw error;
      reasons.push(error);
    }
  }
}

/** A loaded model. */
export class Model {
  #program;
  #description;
  #images;
  #last = Promise.resolve();

  constructor(description, backend, program, reasons) {
    this.#description = description;
    this.#program = program;
    this.#images = new Map(description.images.map((settings) => [settings.input, readSettings(description, settings)]));
    this.backend = backend;
    this.fallbackReason = reasons.map((error) => error.message).join("; ") || undefined;
  }

  get name() {
    return this.#description.name;
  }

  get version() {
    return this.#description.version;
  }

  get device() {
    return this.#program.device ?? "the CPU";
  }

  get inputs() {
    return this.#program.inputs;
  }

  get outputs() {
    return this.#program.outputs;
  }

  get dimensions() {
    return this.#program.dimensions ?? [];
  }

  get labels() {
    return this.#description.labels?.names ?? [];
  }

  /** The names of the inputs that take images. */
  get imageInputs() {
    return [...this.#images.keys()];
  }

  setDimensions(sizes) {
    if (!this.#program.setDimensions) throw new TypeError("the sizes of this model are fixed");
    this.#program.setDimensions(sizes);
  }

  /** Compute the outputs. Calls are done in turn. */
  run(values) {
    // the caller may change its arrays as soon as this returns
    const own = {};
    try {
      this.#check(values);
      for (const { name } of this.inputs) Object.defineProperty(own, name, { value: values[name].slice(), enumerable: true });
    } catch (error) {
      return Promise.reject(error);
    }
    return this.#inTurn((program) => program.run(own));
  }

  /* States, which the loader of WebAssembly keeps: see its methods of the same names. */

  get length() {
    return this.#program.length;
  }

  get dropped() {
    return this.#program.dropped;
  }

  async step(values) {
    return this.#change("step", Object.fromEntries(Object.entries(values).map(([name, array]) => [name, array.slice()])));
  }

  reset() {
    return this.#change("reset");
  }

  truncate(length) {
    return this.#change("truncate", length);
  }

  drop(count) {
    return this.#change("drop", count);
  }

  state(name) {
    return this.#change("state", name);
  }

  saveState() {
    return this.#change("saveState");
  }

  async loadState(saved) {
    return this.#change("loadState", saved.slice());
  }

  async fork() {
    return new Model(this.#description, this.backend, await this.#change("fork"), []);
  }

  async sample(logits, sampling, recent = []) {
    return this.#change("sample", logits.slice(), { ...sampling }, [...recent]);
  }

  seed(seed) {
    return this.#change("seed", seed);
  }

  #change(name, ...values) {
    if (!this.#program[name]) return Promise.reject(new TypeError("the model keeps no states"));
    return this.#inTurn((program) => program[name](...values));
  }

  #inTurn(call) {
    const result = this.#last.then(() => call(this.#program));
    this.#last = result.catch(() => {});
    return result;
  }

  #check(values) {
    const unknown = Object.keys(values).filter((name) => !this.inputs.some((tensor) => tensor.name === name));
    if (unknown.length) throw new TypeError(`the model has no input ${unknown.join(", ")}`);
    for (const { name, dtype, shape } of this.inputs) {
      const type = ARRAYS[dtype];
      const length = shape.reduce((product, size) => product * size, 1);
      const given = Object.hasOwn(values, name) ? values[name] : undefined;
      if (given?.constructor !== type || given.length !== length)
        throw new TypeError(`input ${name} must be a ${type.name} of ${length} elements`);
    }
  }

  /** Make an input of one image, or of several for a batch, by the settings of the recipe. */
  async image(source, name = this.imageInputs[0]) {
    if (!this.#images.has(name)) throw new TypeError(`no input ${name} takes images`);
    const { dtype, shape } = this.inputs.find((tensor) => tensor.name === name);
    const settings = { ...this.#images.get(name), batch: shape[0] };
    const values = new ARRAYS[dtype](shape.reduce((product, size) => product * size, 1));
    const images = await Promise.all((Array.isArray(source) ? source : [source]).map(readPixels));
    preprocess(settings, images, values);
    return values;
  }

  /** Return the best classes of an image; of a list of images, those of each. */
  async classify(source, top = BEST) {
    const name = this.imageInputs[0];
    const values = await this.image(source, name);
    const outputs = await this.run({ [name]: values });
    const ranked = this.rank(outputs, top);
    return Array.isArray(source) ? ranked.slice(0, source.length) : ranked[0];
  }

  /** Return the best classes of each sample, by the scores in the first output. */
  rank(outputs, top = BEST) {
    const { labels, outputs: tensors } = this.#description;
    if (!labels) throw new TypeError("the model has no labels");
    const { name, dtype } = tensors[0];
    const scores = toNumbers(outputs[name], dtype);
    const count = labels.names.length;
    const isProbability = findProbabilities(scores, count, labels.activation);
    return Array.from({ length: scores.length / count }, (_, sample) => {
      const own = scores.subarray(sample * count, (sample + 1) * count);
      const probabilities = toProbabilities(own, dtype, isProbability);
      // equal ones stay in their order
      const order = Array.from(probabilities.keys()).sort((a, b) => compare(probabilities[b], probabilities[a]) || a - b);
      return order
        .slice(0, top)
        .map((position) => ({ label: labels.names[position], probability: probabilities[position], position }));
    });
  }

  /** Free the model's memory. */
  destroy() {
    this.#program.destroy();
  }
}

/* NaN comes last. */
function compare(a, b) {
  return (Number.isNaN(a) ? -Infinity : a) - (Number.isNaN(b) ? -Infinity : b) || 0;
}

function readSettings({ inputs }, settings) {
  const { dtype } = inputs.find((tensor) => tensor.name === settings.input);
  const bytes = Uint8Array.from(atob(settings.table), (char) => char.charCodeAt(0));
  return { ...settings, table: new ARRAYS[dtype](bytes.buffer) };
}

/** Return the values of a tensor as numbers of JavaScript. */
export function toNumbers(values, dtype) {
  if (dtype === "float16") return Float64Array.from(values, (bits) => halfToNumber(bits));
  if (dtype === "bfloat16") return Float64Array.from(new Float32Array(Uint32Array.from(values, (bits) => bits << 16).buffer));
  return Float64Array.from(values, Number);
}

function halfToNumber(bits) {
  const sign = bits & 0x8000 ? -1 : 1;
  const exponent = (bits >> 10) & 31;
  const fraction = bits & 1023;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return exponent ? sign * 2 ** (exponent - 15) * (1 + fraction / 1024) : sign * 2 ** -24 * fraction;
}

/* The model's last operator decides, else the sums of scores. */
function findProbabilities(scores, count, activation) {
  if (activation) return true;
  for (let start = 0; start < scores.length; start += count) {
    const own = scores.subarray(start, start + count);
    const sum = own.reduce((total, value) => total + value, 0);
    if (!(own.every((value) => value >= 0) && Math.abs(sum - 1) <= 0.01)) return false;
  }
  return true;
}

function toProbabilities(scores, dtype, isProbability) {
  if (dtype === "uint8") return scores.map((value) => value / 256);
  if (dtype === "int8") return scores.map((value) => (value + 128) / 256);
  if (isProbability) return scores;
  const known = scores.map((value) => (Number.isNaN(value) ? -Infinity : Math.min(value, Number.MAX_VALUE)));
  const largest = known.reduce((a, b) => Math.max(a, b), -Infinity);
  const raised = known.map((value) => Math.exp(value - largest));
  const total = raised.reduce((sum, value) => sum + value, 0);
  return raised.map((value) => value / total);
}

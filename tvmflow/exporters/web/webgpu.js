/* Programs for WebGPU: buffers, pipelines and steps, as `compiler/c_program/web_program.py` writes them. */
import { ARRAYS, fetchFile, ModelError } from "./runtime.js";

const SEPARATOR = "//----\n";
const PATIENCE = 100; // milliseconds
const REMEDY = "load the model again, or with { backend: \"wasm\" }";

/** Load a program on a device: weights are uploaded, and all kernels are compiled. */
export async function open(files, description, options = {}) {
  const gpu = options.device ? undefined : globalThis.navigator?.gpu;
  if (!options.device && !gpu) {
    const where = globalThis.isSecureContext === false ? "; it is on pages by HTTPS or from localhost" : "";
    throw new ModelError("no-webgpu", `this browser has no WebGPU${where}`);
  }
  const adapter = options.device ? undefined : await findAdapter(gpu, options);
  const program = JSON.parse(new TextDecoder().decode(await fetchFile(files.program, { fetch: options.fetch })));
  check(program, options.device ?? adapter);
  const [sources, weights] = await Promise.all([
    fetchFile(files.kernels, { fetch: options.fetch }),
    fetchFile(files.weights, options),
  ]);
  const device = options.device ?? (await requestDevice(adapter, program));
  const opened = new Program(device, program, description, !options.device);
  opened.device = describeDevice(device.adapterInfo ?? adapter?.info);
  try {
    await opened.build(new TextDecoder().decode(sources).split(SEPARATOR), weights);
  } catch (error) {
    opened.destroy();
    throw error;
  }
  return opened;
}

async function findAdapter(gpu, { powerPreference }) {
  const adapter = await gpu.requestAdapter({ powerPreference });
  if (!adapter) throw new ModelError("no-adapter", "this browser has WebGPU, but no GPU that it uses");
  return adapter;
}

/* What the program needs more than each device has was found when it was built. */
function check({ features, limits }, owner) {
  for (const feature of features) {
    if (!owner.features.has(feature)) throw new ModelError("limit", `the GPU has no ${feature}, which this model needs`);
  }
  for (const [name, value] of Object.entries(limits)) {
    if (owner.limits[name] < value)
      throw new ModelError("limit", `this model needs a GPU with ${name} ${value}, and this one has ${owner.limits[name]}`);
  }
}

async function requestDevice(adapter, { features, limits }) {
  try {
    return await adapter.requestDevice({ requiredFeatures: features, requiredLimits: limits });
  } catch (error) {
    throw new ModelError("no-adapter", `the GPU cannot be used: ${error.message}`, { cause: error });
  }
}

/* Browsers tell few pages more than the maker of a GPU. */
function describeDevice({ description, vendor, architecture } = {}) {
  return description || [vendor, architecture].filter(Boolean).join(" ") || "the GPU";
}

/* The memory of GPUs of browsers has words of 32 bits. */
const typeOf = (dtype) => (dtype === "int64" || dtype === "bool" ? Int32Array : ARRAYS[dtype]);

const WIDEN = {
  int64: (array) => BigInt64Array.from(array, BigInt),
  bool: (array) => ARRAYS.bool.from(array, (value) => Number(value !== 0)),
};

function narrow({ name, dtype }, values) {
  if (dtype === "bool") return Int32Array.from(values, (value) => Number(value !== 0));
  if (!(values instanceof BigInt64Array)) return values;
  const small = Int32Array.from(values, Number);
  const wrong = values.find((value, place) => BigInt(small[place]) !== value);
  if (wrong !== undefined)
    throw new RangeError(`input ${name} has ${wrong}, and WebGPU has integers of 32 bits: load the model with { backend: "wasm" }`);
  return small;
}

const padded = (bytes) => Math.max(4, Math.ceil(bytes / 4) * 4);

class Program {
  #device;
  #isOwn;
  #program;
  #buffers = [];
  #steps = [];
  #results = [];
  #lost;

  constructor(device, program, { inputs, outputs }, isOwn) {
    this.#device = device;
    this.#isOwn = isOwn;
    this.#program = program;
    const count = ({ shape }) => shape.reduce((product, size) => product * size, 1);
    const describe = (tensor) => ({ ...tensor, bytes: count(tensor) * typeOf(tensor.dtype).BYTES_PER_ELEMENT });
    this.inputs = inputs.map(describe);
    this.outputs = outputs.map(describe);
    device.lost.then(({ reason, message }) => {
      this.#lost = reason === "destroyed" ? "its device was destroyed" : message || "its driver stopped";
    });
  }

  /** Upload the weights, and compile the kernels. */
  async build(sources, weights) {
    await this.#guard("memory", "out-of-memory", () => this.#allocate(weights));
    const pipelines = await this.#compile(sources);
    await this.#guard("kernel", "validation", () => this.#prepare(pipelines));
  }

  #allocate(weights) {
    const { STORAGE, COPY_SRC, COPY_DST, MAP_READ } = GPUBufferUsage;
    for (const [kind, bytes, place] of this.#program.buffers) {
      const buffer = this.#device.createBuffer({ size: padded(bytes), usage: STORAGE | COPY_SRC | COPY_DST });
      this.#buffers.push(buffer);
      if (kind === "weights") this.#write(buffer, weights, place, bytes);
    }
    for (const { bytes } of this.outputs)
      this.#results.push(this.#device.createBuffer({ size: padded(bytes), usage: COPY_DST | MAP_READ }));
  }

  /* A queue takes multiples of 4 bytes. */
  #write(buffer, array, offset, bytes) {
    const view = new Uint8Array(array.buffer, array.byteOffset + offset, bytes);
    if (bytes % 4 === 0) return this.#device.queue.writeBuffer(buffer, 0, view);
    const whole = new Uint8Array(padded(bytes));
    whole.set(view);
    return this.#device.queue.writeBuffer(buffer, 0, whole);
  }

  async #compile(sources) {
    const layouts = new Map();
    const compile = async ([entryPoint, access], number) => {
      if (!layouts.has(access)) layouts.set(access, this.#device.createBindGroupLayout(describeLayout(access)));
      const layout = layouts.get(access);
      const module = this.#device.createShaderModule({ code: sources[number] });
      const found = {
        layout: this.#device.createPipelineLayout({ bindGroupLayouts: [layout] }),
        compute: { module, entryPoint },
      };
      try {
        return { layout, pipeline: await this.#device.createComputePipelineAsync(found) };
      } catch (error) {
        const { messages } = await module.getCompilationInfo();
        const [first] = messages.filter(({ type }) => type === "error");
        const text = first ? `${first.lineNum}:${first.linePos}: ${first.message}` : error.message;
        throw new ModelError("kernel", `the browser does not compile the kernel ${number}: ${text}`, { cause: error });
      }
    };
    return this.#unlessLost(Promise.all(this.#program.functions.map(compile)));
  }

  /* Bind the buffers of each launch once. */
  #prepare(pipelines) {
    const uniforms = new Map();
    const uniform = (numbers) => {
      const key = numbers.join();
      if (!uniforms.has(key)) {
        // a uniform buffer has a multiple of 16 bytes
        const data = new Uint32Array(Math.ceil(numbers.length / 4) * 4);
        data.set(numbers);
        const usage = GPUBufferUsage.UNIFORM | GPUBufferUsage.COPY_DST;
        const buffer = this.#device.createBuffer({ size: data.byteLength, usage });
        this.#device.queue.writeBuffer(buffer, 0, data);
        this.#buffers.push(buffer);
        uniforms.set(key, buffer);
      }
      return uniforms.get(key);
    };
    for (const step of this.#program.steps) {
      if (!Array.isArray(step[1])) {
        const [source, target, bytes] = step;
        this.#steps.push({ source: this.#buffers[source], target: this.#buffers[target], bytes: padded(bytes) });
        continue;
      }
      const [number, tensors, grid, numbers] = step;
      const { layout, pipeline } = pipelines[number];
      const buffers = [...tensors.map((tensor) => this.#buffers[tensor]), uniform(numbers)];
      const entries = buffers.map((buffer, binding) => ({ binding, resource: { buffer } }));
      this.#steps.push({ pipeline, grid, group: this.#device.createBindGroup({ layout, entries }) });
    }
  }

  async run(values) {
    this.#checkState();
    const arrays = this.inputs.map((input) => narrow(input, values[input.name]));
    this.inputs.forEach(({ bytes }, place) => {
      this.#write(this.#buffers[this.#find("input", place)], arrays[place], 0, bytes);
    });
    await this.#guard("kernel", "validation", () => this.#device.queue.submit([this.#encode()]));
    const reads = this.#results.map((buffer) => buffer.mapAsync(GPUMapMode.READ));
    await this.#unlessLost(Promise.all(reads));
    return Object.fromEntries(this.outputs.map(({ name, dtype, bytes }, place) => {
      const copy = this.#results[place].getMappedRange().slice(0, bytes);
      this.#results[place].unmap();
      const array = new (typeOf(dtype))(copy);
      return [name, WIDEN[dtype]?.(array) ?? array];
    }));
  }

  #find(kind, place) {
    return this.#program.buffers.findIndex((buffer) => buffer[0] === kind && buffer[2] === place);
  }

  #encode() {
    const encoder = this.#device.createCommandEncoder();
    let pass;
    for (const { pipeline, group, grid, source, target, bytes } of this.#steps) {
      if (!pipeline) {
        pass?.end();
        pass = undefined;
        encoder.copyBufferToBuffer(source, 0, target, 0, bytes);
        continue;
      }
      pass ??= encoder.beginComputePass();
      pass.setPipeline(pipeline);
      pass.setBindGroup(0, group);
      pass.dispatchWorkgroups(...grid);
    }
    pass?.end();
    this.outputs.forEach(({ bytes }, place) => {
      encoder.copyBufferToBuffer(this.#buffers[this.#find("output", place)], 0, this.#results[place], 0, padded(bytes));
    });
    return encoder.finish();
  }

  /* Do something, and throw what the device says of it. */
  async #guard(code, filter, action) {
    const device = this.#device;
    device.pushErrorScope(filter);
    let thrown;
    try {
      action();
    } catch (error) {
      thrown = error;
    }
    const error = await this.#unlessLost(device.popErrorScope());
    if (thrown) throw thrown;
    if (!error) return;
    const what = code === "memory" ? "the GPU has too little memory" : "the GPU refuses a command";
    throw new ModelError(code, `${what}: ${error.message}`);
  }

  async #unlessLost(promise) {
    try {
      const result = await promise;
      this.#checkState();
      return result;
    } catch (error) {
      // what was going on fails before the loss is told
      await Promise.race([this.#device?.lost, new Promise((resolve) => setTimeout(resolve, PATIENCE))]);
      this.#checkState();
      throw error;
    }
  }

  #checkState() {
    if (!this.#device) throw new ModelError("destroyed", "the model was destroyed");
    if (this.#lost) throw new ModelError("lost", `the GPU was lost: ${this.#lost}; ${REMEDY}`);
  }

  destroy() {
    for (const buffer of [...this.#buffers, ...this.#results]) buffer.destroy();
    if (this.#isOwn) this.#device?.destroy();
    this.#device = undefined;
  }
}

function describeLayout(access) {
  const visibility = GPUShaderStage.COMPUTE;
  const types = [...Array.from(access, (letter) => (letter === "r" ? "read-only-storage" : "storage")), "uniform"];
  return { entries: types.map((type, binding) => ({ binding, visibility, buffer: { type } })) };
}

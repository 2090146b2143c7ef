/* The page of a model: an image of one's own, or inputs as JSON, and the outputs. Texts are never read as HTML. */
import { ARRAYS, toNumbers } from "./runtime.js";

const BACKENDS = { auto: "the best that this browser has", webgpu: "WebGPU", wasm: "WebAssembly" };
const SHOWN = 24;
const BIG = ["int64", "uint64"];
const byId = (id) => document.getElementById(id);
// inputs may be called `constructor` or `__proto__`
const state = { model: undefined, images: Object.create(null), texts: Object.create(null), outputs: undefined };

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== undefined));
  return made;
}

function say(text, isError = false) {
  const status = byId("status");
  status.textContent = text;
  status.classList.toggle("error", isError);
}

function fail(error) {
  console.error(error);
  say(error?.message ?? String(error), true);
}

const sizeOf = (shape) => shape.reduce((product, size) => product * size, 1);
const whereOf = ({ backend, device }) => `by ${BACKENDS[backend]} on ${device}`;
const describe = ({ dtype, shape }) => `${dtype} [${shape.join(", ")}]`;

async function start() {
  const { load, backends } = await import(document.body.dataset.model);
  const asked = new URLSearchParams(location.search).get("backend") ?? "auto";
  const choices = ["auto", ...backends];
  const chosen = choices.includes(asked) ? asked : "auto";
  showBackends(choices, chosen);
  await open(load, chosen);
  showInputs();
  byId("form").hidden = false;
  byId("form").addEventListener("submit", (event) => {
    event.preventDefault();
    run().catch(fail);
  });
  byId("backends").addEventListener("change", (event) => {
    const before = state.model;
    busy(true);
    open(load, event.target.value)
      .then(() => before.destroy())
      .catch(fail)
      .finally(() => busy(false));
  });
  byId("save").addEventListener("click", save);
}

function showBackends(names, chosen) {
  // with one backend there is nothing to choose
  byId("settings").hidden = names.length < 3;
  for (const name of names) {
    const radio = element("input", { type: "radio", name: "backend", value: name });
    radio.checked = name === chosen;
    byId("backends").append(element("label", {}, radio, ` ${BACKENDS[name]}`));
  }
}

async function open(load, backend) {
  say("Loading the model…");
  const bar = element("progress", { "aria-label": "Loading", max: 1, value: 0 });
  byId("status").append(bar);
  const onprogress = ({ loaded, total }) => (bar.value = loaded / total);
  const model = await load({ backend, onprogress });
  state.model = model;
  const reason = model.fallbackReason ? ` (${model.fallbackReason})` : "";
  say(`Ready. The model runs ${whereOf(model)}${reason}.`);
  document.body.dataset.ready = model.backend;
}

function busy(isBusy) {
  byId("run").disabled = isBusy;
}

function showInputs() {
  const { model } = state;
  model.inputs.forEach((tensor, place) => {
    const isImage = model.imageInputs.includes(tensor.name);
    byId("inputs").append((isImage ? showImageInput : showTextInput)(tensor, `input${place}`));
  });
}

function showImageInput(tensor, id) {
  const file = element("input", { type: "file", accept: "image/*", id, "aria-describedby": `${id}-hint` });
  const canvas = element("canvas", { width: 0, height: 0, role: "img", "aria-label": "The image that you chose" });
  canvas.hidden = true;
  const drop = element(
    "div", { class: "drop" },
    element("span", {}, "Choose an image, drop one here, or paste one"), file, canvas);
  const take = async (blob) => {
    if (!blob) return;
    const bitmap = await createImageBitmap(blob, { imageOrientation: "from-image" });
    Object.assign(canvas, { width: bitmap.width, height: bitmap.height }).hidden = false;
    canvas.getContext("2d").drawImage(bitmap, 0, 0);
    bitmap.close();
    state.images[tensor.name] = blob;
    if (state.model.inputs.every(({ name }) => name in state.images || name in state.texts)) await run();
  };
  const choose = (blob) => take(blob).catch(() => fail(new Error("The browser cannot read this image.")));
  file.addEventListener("change", () => choose(file.files[0]));
  drop.addEventListener("dragover", (event) => {
    event.preventDefault();
    drop.classList.add("over");
  });
  drop.addEventListener("dragleave", () => drop.classList.remove("over"));
  drop.addEventListener("drop", (event) => {
    event.preventDefault();
    drop.classList.remove("over");
    choose(event.dataTransfer.files[0]);
  });
  document.addEventListener("paste", (event) => choose(event.clipboardData.files[0]));
  return showInput(tensor, id, drop, "an image; it is resized and scaled as the model needs it");
}

function showTextInput(tensor, id) {
  const text = element("textarea", { id, spellcheck: "false", "aria-describedby": `${id}-hint` });
  const count = sizeOf(tensor.shape);
  text.placeholder = `${count} numbers as JSON, such as [0, 0.5, …]; one number stands for all`;
  text.value = "0";
  state.texts[tensor.name] = text;
  return showInput(tensor, id, text, `${count} numbers as JSON, in any nesting; one number stands for all`);
}

function showInput(tensor, id, control, hint) {
  return element(
    "div", { class: "input" },
    element("label", { for: id }, tensor.name),
    element("p", { class: "hint", id: `${id}-hint` }, `${describe(tensor)}: ${hint}`),
    control);
}

function readText({ name, dtype, shape }) {
  let values;
  try {
    values = [JSON.parse(state.texts[name].value)].flat(Infinity);
  } catch (error) {
    throw new Error(`${name}: this is not JSON: ${error.message}`);
  }
  const count = sizeOf(shape);
  if (values.length === 1) values = Array(count).fill(values[0]);
  if (values.length !== count) throw new Error(`${name}: there are ${values.length} numbers, and the input has ${count}`);
  if (values.some((value) => typeof value !== "number" && typeof value !== "boolean"))
    throw new Error(`${name}: there is something else than numbers`);
  return ARRAYS[dtype].from(BIG.includes(dtype) ? values.map((value) => BigInt(Math.trunc(value))) : values);
}

async function run() {
  const { model, images } = state;
  busy(true);
  try {
    const values = {};
    for (const tensor of model.inputs) {
      const isImage = model.imageInputs.includes(tensor.name);
      if (isImage && !(tensor.name in images)) throw new Error("Choose an image first.");
      const made = isImage ? await model.image(images[tensor.name], tensor.name) : readText(tensor);
      Object.defineProperty(values, tensor.name, { value: made, enumerable: true });
    }
    say("Computing…");
    const begin = performance.now();
    const outputs = await model.run(values);
    const time = performance.now() - begin;
    state.outputs = outputs;
    showOutputs(outputs, time);
    say("Done.");
  } finally {
    busy(false);
  }
}

function showOutputs(outputs, time) {
  const { model } = state;
  byId("time").textContent = `${time < 10 ? time.toFixed(1) : Math.round(time)} ms ${whereOf(model)}`;
  const shown = [];
  if (model.labels.length) {
    const ranked = model.rank(outputs);
    const title = (sample) => (ranked.length > 1 ? element("p", { class: "label" }, `Sample ${sample + 1}`) : undefined);
    ranked.forEach((classes, sample) => shown.push(...[title(sample), showClasses(classes)].filter(Boolean)));
  }
  shown.push(...model.outputs.map((tensor) => showTensor(tensor, outputs[tensor.name])));
  byId("outputs").replaceChildren(...shown);
  byId("results").hidden = false;
}

function showClasses(classes) {
  const items = classes.map(({ label, probability }) => {
    const percent = `${(100 * probability).toFixed(2)} %`;
    const meter = element("meter", { min: 0, max: 1, value: Number.isNaN(probability) ? 0 : probability, "aria-hidden": "true" });
    return element("li", {}, element("span", { class: "name" }, label), element("span", {}, percent), meter);
  });
  return element("ol", { class: "classes" }, ...items);
}

function showTensor(tensor, values) {
  const numbers = toNumbers(values, tensor.dtype);
  const finite = numbers.filter(Number.isFinite);
  const extreme = (choose) => (finite.length ? format(finite.reduce((a, b) => choose(a, b))) : "–");
  const row = [tensor.name, describe(tensor), extreme(Math.min), extreme(Math.max)];
  const head = ["output", "type", "least", "largest"].map((text) => element("th", { scope: "col" }, text));
  const more = numbers.length > SHOWN ? ", …" : "";
  return element(
    "div", { class: "tensor", tabindex: 0, role: "region", "aria-label": `output ${tensor.name}` },
    element("table", {},
      element("thead", {}, element("tr", {}, ...head)),
      element("tbody", {}, element("tr", {}, ...row.map((text) => element("td", {}, text))))),
    element("pre", {}, Array.from(numbers.subarray(0, SHOWN), format).join(", ") + more));
}

const format = (value) => (Number.isInteger(value) ? String(value) : Number(value.toPrecision(6)).toString());

function save() {
  const values = Object.fromEntries(
    state.model.outputs.map((tensor) => [
      tensor.name,
      { dtype: tensor.dtype, shape: tensor.shape, data: Array.from(toNumbers(state.outputs[tensor.name], tensor.dtype)) },
    ]));
  const url = URL.createObjectURL(new Blob([JSON.stringify(values)], { type: "application/json" }));
  element("a", { href: url, download: `${state.model.name}.json` }).click();
  URL.revokeObjectURL(url);
}

// modules are not loaded from files at all, so that this is a page from a server
start().catch(fail);

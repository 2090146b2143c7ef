/* @TITLE@
 *
@TENSORS@
 *
 *   import { load } from "./@NAME@.js";
 *   const model = await load();
 *   const outputs = await model.run({ name: values, ... }); // typed arrays by name
 */
import { fetchFile, openModel } from "./runtime.js";

export { Model, ModelError } from "./runtime.js";

const DESCRIPTION = @DESCRIPTION@;
const FILES = {
@FILES@
};
const BACKENDS = {
@BACKENDS@
};

/** The backends, the one that is tried first at first. */
export const backends = Object.keys(BACKENDS);

/** Load the model; see the types beside this module. */
export function load(options) {
  return openModel(DESCRIPTION, FILES, BACKENDS, options);
}

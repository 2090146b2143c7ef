/* @TITLE@
 *
@TENSORS@
 */

export interface Inputs {
@INPUTS@
}

export interface Outputs {
@OUTPUTS@
}

/** The sizes that each call chooses. */
export interface Sizes {
@SIZES@
}

export type Backend = @BACKENDS@;
/** An input that takes images. */
export type ImageInput = @IMAGE_INPUTS@;

@STATE_TYPES@export interface Tensor {
  readonly name: string;
  readonly dtype: string;
  readonly shape: readonly number[];
}

export interface Prediction {
  label: string;
  probability: number;
  /** Its place among the scores. */
  position: number;
}

/** RGBA, 8 bits for each channel. */
export interface Pixels {
  data: Uint8ClampedArray | Uint8Array;
  width: number;
  height: number;
}

export type Image =
  | Pixels
  | Blob
  | ImageBitmap
  | HTMLImageElement
  | HTMLCanvasElement
  | HTMLVideoElement
  | OffscreenCanvas;

export interface Options {
  /** How the model runs; by default the first of these that the browser has. */
  backend?: "auto" | Backend;
  /** Called while files are fetched. */
  onprogress?: (progress: { loaded: number; total: number }) => void;
  fetch?: typeof fetch;
@OPTIONS@}

/** `code` says what happened, the message also what to do. */
export class ModelError extends Error {
  readonly code: "fetch" | "no-webgpu" | "no-adapter" | "limit" | "kernel" | "memory" | "lost" | "destroyed";
}

export class Model {
  readonly name: string;
  readonly version: string;
  readonly backend: Backend;
  /** Where it runs: the GPU, as far as the browser tells it, or `the CPU`. */
  readonly device: string;
  /** Why it does not run on the backend that is tried first. */
  readonly fallbackReason: string | undefined;
  readonly inputs: readonly Tensor[];
  readonly outputs: readonly Tensor[];
  readonly labels: readonly string[];
  readonly imageInputs: readonly ImageInput[];
  readonly dimensions: readonly { name: string; min: number; max: number; multipleOf: number; size: number }[];
  /** Compute the outputs; calls are done in turn. Arrays are in C order. */
  run(values: Inputs): Promise<Outputs>;
  /** Make an input of one image, or of several for a batch. */
  image<Name extends ImageInput>(source: Image | Image[], name?: Name): Promise<Inputs[Name]>;
  /** Return the best classes of an image, the best first. */
  classify(source: Image, top?: number): Promise<Prediction[]>;
  classify(source: Image[], top?: number): Promise<Prediction[][]>;
  /** Return the best classes of each sample, by the scores in the first output. */
  rank(outputs: Outputs, top?: number): Prediction[][];
  setDimensions(sizes: Partial<Sizes>): void;
@STATE_METHODS@  destroy(): void;
}

/** The one that is tried first at first. */
export const backends: readonly Backend[];
export function load(options?: Options): Promise<Model>;

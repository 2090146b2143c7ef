/** The inputs that are not states. */
export interface StepInputs {
@STEP_INPUTS@
}

export interface StepOutputs {
@STEP_OUTPUTS@
}

export type State = @STATE_NAMES@;

/** How `sample` chooses a token: with all 0, the one of the largest logit. */
export interface Sampling {
  /** What logits are divided by. */
  temperature: number;
  /** Only so many of the largest logits, at most 1024; 0: all. */
  topK: number;
  /** Only the largest logits whose probabilities reach this; 0 or 1: all. */
  topP: number;
  /** What logits of recent tokens are divided by, or multiplied if negative; 0 or 1: none. */
  repetitionPenalty: number;
}

//----
  /** Compute the next step, with states that stay in the model. After an error, they are as before. */
  step(values: StepInputs): Promise<StepOutputs>;
  /** Start again: growing states are empty, the others 0, or what the model begins with. */
  reset(): Promise<void>;
  /** The length of the growing states, such as the tokens in a KV cache; 0 where none grows. */
  readonly length: number;
  /** The rows that `drop` has taken since the beginning: the next position of a token is this plus `length`. */
  readonly dropped: number;
  /** Drop everything after a length of the growing states. */
  truncate(length: number): Promise<void>;
  /** Drop the oldest rows of the growing states. */
  drop(count: number): Promise<void>;
  state<Name extends State>(name: Name): Promise<Inputs[Name]>;
  /** Save all states with a checksum. */
  saveState(): Promise<Uint8Array>;
  /** Go on from what `saveState` of this model returned; what is damaged or foreign is refused. */
  loadState(saved: Uint8Array): Promise<void>;
  /** Another model with the same weights and states. */
  fork(): Promise<Model>;
  /** Choose a token by its logits, after the penalty for `recent` tokens. */
  sample(logits: Float32Array, sampling?: Partial<Sampling>, recent?: number[]): Promise<number>;
  /** Set the random state of `sample`, which is saved, forked and reset with the states. */
  seed(seed: number | bigint): Promise<void>;

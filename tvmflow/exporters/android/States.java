  /** The inputs that are states, which the model keeps from step to step, and the other inputs and outputs. */
  public static final List<Tensor> STATES = pick(INPUTS%(states)s);
  public static final List<Tensor> STEP_INPUTS = pick(INPUTS%(step_inputs)s);
  public static final List<Tensor> STEP_OUTPUTS = pick(OUTPUTS%(step_outputs)s);
//----
  /** How `sample` chooses a token: with all 0, the one of the largest logit. */
  public static final class Sampling {
    /** What logits are divided by. */
    public float temperature;
    /** Only so many of the largest logits, at most 1024; 0: all. */
    public int topK;
    /** Only the largest logits whose probabilities reach this; 0 or 1: all. */
    public float topP;
    /** What logits of recent tokens are divided by, or multiplied if negative; 0 or 1: none. */
    public float repetitionPenalty;
  }

  /**
   * Computes the next step from inputs that are not states. After an exception, the states are as before.
   *
   * @param inputs direct buffers in the order of STEP_INPUTS, see `run` and `allocate`
   * @param outputs direct buffers in the order of STEP_OUTPUTS
   */
  public synchronized void step(ByteBuffer[] inputs, ByteBuffer[] outputs) {
    check(takeStep(handle(), slices(inputs), writable(outputs)));
    updateLength();
  }

  /** Computes the next step, if all its inputs and outputs are float32. */
  public synchronized float[][] step(float[]... inputs) {
    updateLength();
    ByteBuffer[] taken = fill(STEP_INPUTS, inputs), given = allocate(STEP_OUTPUTS);
    check(takeStep(handle(), slices(taken), slices(given)));
    float[][] results = read(STEP_OUTPUTS, given);
    updateLength();
    return results;
  }

  /** Starts again: growing states are empty, the others 0, or what the model begins with. */
  public synchronized void reset() {
    check(resetStates(handle()));
    updateLength();
  }

  /** The length of the growing states, such as the tokens in a KV cache; 0 where none grows. */
  public synchronized long length() {
    return measureStates(handle())[0];
  }

  /** The rows that `drop` has taken since the beginning: the next position of a token is this plus `length`. */
  public synchronized long dropped() {
    return measureStates(handle())[1];
  }

  /** Drops everything after a length of the growing states. */
  public synchronized void truncate(long length) {
    check(truncateStates(handle(), length));
    updateLength();
  }

  /** Drops the oldest rows of the growing states. */
  public synchronized void drop(long count) {
    check(dropRows(handle(), count));
    updateLength();
  }

  /** A copy of the values of a state, by the name of its input. */
  public synchronized ByteBuffer state(String name) {
    for (int i = 0; i < STATES.size(); ++i) {
      if (!STATES.get(i).name.equals(name)) continue;
      updateLength();
      ByteBuffer values = allocate(STATES.get(i));
      check(readState(handle(), i, values));
      return values;
    }
    throw new IllegalArgumentException("the model has no state of this name");
  }

  /** All states with a checksum, for `loadState` of any library of this model. */
  public synchronized byte[] saveState() {
    ByteBuffer saved = ByteBuffer.allocateDirect(toInt(measureStates(handle())[2]));
    check(saveStates(handle(), saved));
    byte[] bytes = new byte[saved.capacity()];
    saved.get(bytes);
    return bytes;
  }

  /** Goes on from what `saveState` returned. What is damaged, or of another model, is refused and changes nothing. */
  public synchronized void loadState(byte[] saved) {
    ByteBuffer bytes = ByteBuffer.allocateDirect(saved.length);
    bytes.put(saved);
    check(loadStates(handle(), bytes));
    updateLength();
  }

  /** Another model with the same weights and states. */
  public synchronized %(class)s fork() {
    return new %(class)s(forkStates(handle()));
  }

  /** Chooses a token by its logits, after the penalty for `recent` tokens. */
  public synchronized long sample(float[] logits, Sampling sampling, long... recent) {
    ByteBuffer values = ByteBuffer.allocateDirect(4 * logits.length).order(ByteOrder.nativeOrder());
    ByteBuffer tokens = ByteBuffer.allocateDirect(8 * recent.length).order(ByteOrder.nativeOrder());
    values.asFloatBuffer().put(logits);
    tokens.asLongBuffer().put(recent);
    long[] chosen =
        chooseToken(handle(), values, sampling.temperature, sampling.topK, sampling.topP, sampling.repetitionPenalty, tokens);
    check((int) chosen[1]);
    return chosen[0];
  }

  /** Sets the random state of `sample`, which is saved, forked and reset with the states. */
  public synchronized void seed(long seed) {
    check(setSeed(handle(), seed));
  }

  /* Lets the dimension that is the length of the states follow it. */
  private void updateLength() {
    int dimension = %(length)s;
    if (dimension >= 0) check(choose(handle(), dimension, length()));
  }

  private static List<Tensor> pick(List<Tensor> tensors, int... places) {
    Tensor[] picked = new Tensor[places.length];
    for (int i = 0; i < places.length; ++i) picked[i] = tensors.get(places[i]);
    return listOf(picked);
  }

//----

  private static native int takeStep(long handle, ByteBuffer[] inputs, ByteBuffer[] outputs);

  private static native int resetStates(long handle);

  private static native long[] measureStates(long handle);

  private static native int truncateStates(long handle, long length);

  private static native int dropRows(long handle, long count);

  private static native int readState(long handle, int state, ByteBuffer values);

  private static native int saveStates(long handle, ByteBuffer saved);

  private static native int loadStates(long handle, ByteBuffer saved);

  private static native long[] forkStates(long handle);

  private static native long[] chooseToken(
      long handle, ByteBuffer logits, float temperature, int topK, float topP, float penalty, ByteBuffer recent);

  private static native int setSeed(long handle, long seed);

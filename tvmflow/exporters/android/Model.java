// Written by tvmflow.
package %(package)s;

import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.FloatBuffer;
import java.nio.charset.StandardCharsets;
import java.util.Arrays;
import java.util.Collections;
import java.util.List;

/**
 * A model that is ready to run, with memory and threads of its own; all share the weights. Calls from several threads
 * wait for each other: make an object for each thread that should not wait. Close it after use.
 */
public final class %(class)s implements AutoCloseable {
  /** An input or output of the model. */
  public static final class Tensor {
    public final String name;
    /** NumPy's name of the type of its numbers: float32, int64, bool, ... */
    public final String type;
    private final long[] shape;

    private Tensor(String name, String type, long... shape) {
      this.name = name;
      this.type = type;
      this.shape = shape;
    }

    /** Its sizes; one that each call chooses, or that follows from these, is -1. */
    public long[] shape() {
      return shape.clone();
    }

    private int bytesOfNumber() {
      return type.equals("bool") ? 1 : Integer.parseInt(type.replaceAll("[^0-9]", "")) / 8;
    }
  }

  public static final List<Tensor> INPUTS = listOf(%(inputs)s);
  public static final List<Tensor> OUTPUTS = listOf(%(outputs)s);
%(state_lists)s  /** The names of the sizes that each call chooses. */
  public static final List<String> DIMENSIONS =
      Collections.unmodifiableList(Arrays.asList(new String[] {%(dimensions)s}));

  static {
    System.loadLibrary(%(library)s);
  }

  private long handle;

  /** Uses a thread for each CPU, and no more than the model is worth. */
  public %(class)s() {
    this(0);
  }

  /** @throws UnsupportedOperationException if the CPU lacks an instruction set that the library was built for */
  public %(class)s(int threads) {
    this(create(threads));
  }

  private %(class)s(long[] made) {
    check((int) made[1]);
    handle = made[0];
  }

  /** Waits for a call that runs. After it, no other method may be called; a second close does nothing. */
  @Override
  public synchronized void close() {
    if (handle == 0) return;
    check(destroy(handle));
    handle = 0;
  }

  /** Chooses the size of a dimension for the next calls; at first all have the smallest ones. */
  public synchronized void setDimension(String name, long size) {
    int index = DIMENSIONS.indexOf(name);
    if (index < 0) throw new IllegalArgumentException("the model has no dimension of this name");
    check(choose(handle(), index, size));
  }

  /** The shape that an input must have in the next call. */
  public synchronized long[] inputShape(int index) {
    return found(shapeOf(handle(), false, index));
  }

  /** The shape of an output: after a call, the rows that count are the first ones where the model selects some. */
  public synchronized long[] outputShape(int index) {
    return found(shapeOf(handle(), true, index));
  }

  /** Memory for an input of the next call, with the machine's byte order. It may be used for many calls. */
  public ByteBuffer allocateInput(int index) {
    return allocate(INPUTS.get(index), inputShape(index));
  }

  /** The same for one of INPUTS or OUTPUTS. */
  public ByteBuffer allocate(Tensor tensor) {
    int index = INPUTS.indexOf(tensor);
    return index < 0 ? allocateOutput(OUTPUTS.indexOf(tensor)) : allocateInput(index);
  }

  /** Memory for an output of the next call, with the machine's byte order. It may be used for many calls. */
  public synchronized ByteBuffer allocateOutput(int index) {
    Tensor tensor = OUTPUTS.get(index);
    for (long size : tensor.shape) if (size < 0) return allocate(tensor, outputShape(index));
    // the largest size, which a call may have made smaller
    return allocate(tensor, tensor.shape);
  }

  /**
   * Computes the outputs in the caller's memory, without a copy where it begins at a multiple of 64 bytes.
   *
   * @param inputs direct buffers in the order of INPUTS: what is between position and limit, which do not move
   * @param outputs direct buffers in the order of OUTPUTS
   * @throws IllegalArgumentException if a buffer has another size than the model's, or shares memory with another
   */
  public synchronized void run(ByteBuffer[] inputs, ByteBuffer[] outputs) {
    check(compute(handle(), slices(inputs), writable(outputs)));
  }

  /**
   * Computes the outputs of a model whose inputs and outputs are all float32.
   *
   * @param inputs the numbers of each input, in the order of INPUTS
   * @return the numbers of each output, in the order of OUTPUTS
   */
  public synchronized float[][] run(float[]... inputs) {
    ByteBuffer[] taken = fill(INPUTS, inputs), given = allocate(OUTPUTS);
    run(taken, given);
    return read(OUTPUTS, given);
  }

%(states)s  private ByteBuffer[] fill(List<Tensor> tensors, float[][] inputs) {
    if (inputs.length != tensors.size())
      throw new IllegalArgumentException("there are " + tensors.size() + " inputs, not " + inputs.length);
    ByteBuffer[] taken = allocate(tensors);
    for (int i = 0; i < taken.length; ++i) {
      FloatBuffer floats = floats(tensors.get(i), taken[i]);
      if (floats.capacity() != inputs[i].length)
        throw new IllegalArgumentException(
            "input " + i + " has " + floats.capacity() + " numbers, not " + inputs[i].length);
      floats.put(inputs[i]);
    }
    return taken;
  }

  private ByteBuffer[] allocate(List<Tensor> tensors) {
    ByteBuffer[] buffers = new ByteBuffer[tensors.size()];
    for (int i = 0; i < buffers.length; ++i) buffers[i] = allocate(tensors.get(i));
    return buffers;
  }

  private float[][] read(List<Tensor> tensors, ByteBuffer[] given) {
    float[][] results = new float[given.length][];
    for (int i = 0; i < given.length; ++i) {
      Tensor tensor = tensors.get(i);
      results[i] = new float[count(outputShape(OUTPUTS.indexOf(tensor)))];
      floats(tensor, given[i]).get(results[i]);
    }
    return results;
  }

  private static List<Tensor> listOf(Tensor... tensors) {
    return Collections.unmodifiableList(Arrays.asList(tensors));
  }

  private static ByteBuffer allocate(Tensor tensor, long[] shape) {
    int bytes = toInt((long) count(shape) * tensor.bytesOfNumber());
    return ByteBuffer.allocateDirect(bytes).order(ByteOrder.nativeOrder());
  }

  private static int count(long[] shape) {
    long count = 1;
    // not Math.multiplyExact: Android has it, as it has streams, since API 24
    for (long size : shape) count = toInt(count * size);
    return (int) count;
  }

  private static int toInt(long number) {
    if (number != (int) number) throw new ArithmeticException("a tensor is too large for a buffer of Java");
    return (int) number;
  }

  private static FloatBuffer floats(Tensor tensor, ByteBuffer buffer) {
    if (!tensor.type.equals("float32"))
      throw new IllegalArgumentException(
          "an input or output is " + tensor.type + ", not float32: use run(ByteBuffer[], ByteBuffer[])");
    return buffer.asFloatBuffer();
  }

  private static ByteBuffer[] slices(ByteBuffer[] buffers) {
    ByteBuffer[] slices = new ByteBuffer[buffers.length];
    for (int i = 0; i < slices.length; ++i) {
      if (!buffers[i].isDirect())
        throw new IllegalArgumentException("buffer " + i + " is not direct: make it with ByteBuffer.allocateDirect");
      slices[i] = buffers[i].slice();
    }
    return slices;
  }

  private static ByteBuffer[] writable(ByteBuffer[] buffers) {
    for (ByteBuffer buffer : buffers)
      if (buffer.isReadOnly()) throw new IllegalArgumentException("an output is read-only");
    return slices(buffers);
  }

  private static long[] found(long[] shape) {
    if (shape == null) throw new IndexOutOfBoundsException("the model has no such input or output");
    return shape;
  }

  private long handle() {
    if (handle == 0) throw new IllegalStateException("the model is closed");
    return handle;
  }

  private static void check(int status) {
    if (status == %(OK)s) return;
    String text = new String(message(status), StandardCharsets.UTF_8);
    if (status >= %(WRONG_VALUE)s) throw new IllegalArgumentException(text);
    switch (status) {
      case %(MISSING_FEATURE)s:
        String feature = new String(missingFeature(), StandardCharsets.UTF_8);
        throw new UnsupportedOperationException(text + ": " + feature);
      case %(NO_MEMORY)s:
        throw new OutOfMemoryError(text);
%(argument_cases)s        throw new IllegalArgumentException(text);
      default:
        throw new IllegalStateException(text);
    }
  }

  private static native long[] create(int threads);

  private static native int destroy(long handle);

  private static native int compute(long handle, ByteBuffer[] inputs, ByteBuffer[] outputs);

  private static native long[] shapeOf(long handle, boolean isOutput, int index);

  private static native int choose(long handle, int dimension, long size);
%(state_natives)s
  private static native byte[] message(int status);

  private static native byte[] missingFeature();
}

"""`android`: what its libraries need of Android, and its class of Java on this machine's JVM with a library of the same C code."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.support import exports
from tests.support.exports import Array, Exported
from tests.support.hostile_names import draw_names
from tests.support.recipes import ROOT
from tests.unit.targets.state_libraries import write_library
from tvmflow.exporters import android
from tvmflow.exporters.exporter import ExportRequest
from tvmflow.targets import c_runtime, form_names
from tvmflow.targets.c_runtime import DescribedModel, JavaClass

JAVAC = shutil.which("javac")
needs_java = pytest.mark.skipif(JAVAC is None, reason="needs a JDK (javac)")

CHECKS = """
public class Checks {
  interface Action { void run(); }

  static void refuses(Class<? extends Throwable> type, String text, Action action) {
    try {
      action.run();
    } catch (Throwable error) {
      if (type.isInstance(error) && error.getMessage().contains(text)) return;
      throw new AssertionError(text, error);
    }
    throw new AssertionError("not refused: " + text);
  }
}
"""
MAIN = """
import java.nio.*;
import java.nio.file.*;
import tvmflow.models.DigitsModel;

public class Main extends Checks {
  public static void main(String[] words) throws Exception {
    FloatBuffer images = ByteBuffer.wrap(Files.readAllBytes(Paths.get(words[0]))).order(ByteOrder.nativeOrder()).asFloatBuffer();
    ByteBuffer scores = ByteBuffer.allocate(images.capacity() / 64 * 40).order(ByteOrder.nativeOrder());
    DigitsModel model = new DigitsModel(2);
    float[] image = new float[64];
    ByteBuffer in = model.allocateInput(0), out = model.allocateOutput(0);
    while (images.hasRemaining()) {
      images.get(image);
      float[] result = model.run(image)[0];
      in.asFloatBuffer().put(image);
      model.run(new ByteBuffer[] {in.asReadOnlyBuffer()}, new ByteBuffer[] {out});
      for (int i = 0; i < 10; ++i) {
        if (out.getFloat(4 * i) != result[i]) throw new AssertionError("buffers and arrays differ");
        scores.putFloat(result[i]);
      }
    }
    Files.write(Paths.get(words[1]), scores.array());
    ByteBuffer[] ins = {in}, outs = {out};
    refuses(IllegalArgumentException.class, "input 0 has 64 numbers, not 3", () -> model.run(new float[3]));
    refuses(IllegalArgumentException.class, "there are 1 inputs, not 2", () -> model.run(image, image));
    refuses(IllegalArgumentException.class, "is not direct", () -> model.run(new ByteBuffer[] {ByteBuffer.allocate(256)}, outs));
    refuses(IllegalArgumentException.class, "another size", () -> model.run(new ByteBuffer[] {ByteBuffer.allocateDirect(8)}, outs));
    refuses(IllegalArgumentException.class, "number of inputs", () -> model.run(new ByteBuffer[] {in, in}, outs));
    refuses(IllegalArgumentException.class, "shares memory", () -> model.run(ins, new ByteBuffer[] {(ByteBuffer) in.duplicate().limit(40)}));
    refuses(IllegalArgumentException.class, "read-only", () -> model.run(ins, new ByteBuffer[] {out.asReadOnlyBuffer()}));
    refuses(IllegalArgumentException.class, "no dimension", () -> model.setDimension("batch", 2));
    refuses(IllegalArgumentException.class, "more threads", () -> new DigitsModel(5000));
    refuses(IndexOutOfBoundsException.class, "no such", () -> model.outputShape(1));
    model.close();
    model.close();
    refuses(IllegalStateException.class, "closed", () -> model.run(image));
    System.out.print(DigitsModel.INPUTS.get(0).name + " " + DigitsModel.OUTPUTS.get(0).shape()[1]);
  }
}
"""


def compile_java(folder: Path, made: JavaClass) -> None:
    (folder / "Checks.java").write_text(CHECKS)
    files = [f"{made.name}.java", "Checks.java", "Main.java"]
    options = ["--release", "8", "-Xlint:all,-options", "-Werror"]
    subprocess.run([str(JAVAC), *options, "-d", ".", *files], cwd=folder, check=True)


def run_java(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    java = str(Path(str(JAVAC)).with_name("java"))
    command = [java, "-Xcheck:jni", "-Djava.library.path=.", "Main", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.slow
@needs_java
def test_java_calls_the_library(exported: Exported, tmp_path: Path) -> None:
    """Scores are the library's, with arrays and with buffers; every mistake is an exception with the reason."""
    built = exports.built_of(exported, exports.recipe(), exports.target())
    model, made = built.c_model, android.java_class("digits")
    c_runtime.link(model, built.forms[form_names.C_LIBRARY], tmp_path / "libdigits.so", java=made)
    (tmp_path / f"{made.name}.java").write_text(android.write_class(model, made))
    (tmp_path / "Main.java").write_text(MAIN)
    images, _ = exports.held_out()
    (tmp_path / "images").write_bytes(np.ascontiguousarray(images, "float32").tobytes())
    compile_java(tmp_path, made)
    done = run_java(tmp_path, "images", "scores")
    assert (done.returncode, done.stdout) == (0, "data 10"), done.stdout + done.stderr
    scores = np.fromfile(tmp_path / "scores", "float32").reshape(-1, 10)
    np.testing.assert_allclose(scores, exports.reference(exported), rtol=1e-4, atol=1e-5)


STATES = """
import java.nio.*;
import java.nio.file.*;
import java.util.Arrays;
import tvmflow.models.CachedModel;

public class Main extends Checks {
  static void require(boolean condition) {
    if (!condition) throw new AssertionError();
  }

  static float[] step(CachedModel model, int tokens) {
    model.setDimension("seq", tokens);
    float[] x = new float[32 * tokens], mask = new float[(int) model.length() + tokens], y = new float[x.length];
    for (int i = 0; i < x.length; ++i) x[i] = i % 13 / 16f - 0.5f;
    Arrays.fill(mask, 1);
    if (tokens % 2 == 1) return model.step(x, mask)[0];
    ByteBuffer[] in = {model.allocate(CachedModel.STEP_INPUTS.get(0)), model.allocate(CachedModel.STEP_INPUTS.get(1))};
    ByteBuffer[] out = {model.allocate(CachedModel.STEP_OUTPUTS.get(0))};
    in[0].asFloatBuffer().put(x);
    in[1].asFloatBuffer().put(mask);
    model.step(in, out);
    out[0].asFloatBuffer().get(y);
    return y;
  }

  static long[] draw(CachedModel model) {
    CachedModel.Sampling sampling = new CachedModel.Sampling();
    sampling.temperature = 1;
    sampling.topK = 3;
    long[] tokens = new long[20];
    for (int i = 0; i < tokens.length; ++i) tokens[i] = model.sample(new float[] {0, 1, 3, 2}, sampling);
    return tokens;
  }

  static void sample(CachedModel model) {
    float[] logits = {0, 1, 3, 2};
    CachedModel.Sampling greedy = new CachedModel.Sampling(), wrong = new CachedModel.Sampling();
    require(model.sample(logits, greedy) == 2);
    greedy.repetitionPenalty = 2;
    require(model.sample(logits, greedy, 2) == 3);
    wrong.topK = -1;
    refuses(IllegalArgumentException.class, "out of its range", () -> model.sample(logits, wrong));
    model.seed(7);
    try (CachedModel copy = model.fork()) {
      long[] tokens = draw(model);
      require(Arrays.equals(draw(copy), tokens) && !Arrays.equals(draw(copy), tokens));
    }
  }

  public static void main(String[] words) throws Exception {
    ByteBuffer made = ByteBuffer.allocate(1 << 16).order(ByteOrder.nativeOrder());
    CachedModel model = new CachedModel(1);
    require(model.length() == 0 && model.state("past_key").capacity() == 0);
    for (int tokens : new int[] {5, 2, 12}) for (float value : step(model, tokens)) made.putFloat(value);
    for (String name : new String[] {"past_key", "past_value"}) made.put(model.state(name));
    byte[] saved = model.saveState();
    Files.write(Paths.get(words[1]), saved);
    CachedModel copy = model.fork();
    float[] following = step(model, 2);
    model.truncate(19);
    require(Arrays.equals(step(model, 2), following) && model.length() == 21);
    model.close();
    require(Arrays.equals(step(copy, 2), following));
    for (float value : following) made.putFloat(value);
    copy.drop(9);
    require(copy.length() == 12 && copy.dropped() == 9);
    made.put(copy.state("past_value"));
    byte[] damaged = copy.saveState();
    damaged[70] ^= 1;
    refuses(IllegalArgumentException.class, "cannot have this length", () -> copy.truncate(13));
    refuses(IllegalArgumentException.class, "cannot have this length", () -> copy.drop(-1));
    refuses(IllegalArgumentException.class, "damaged", () -> copy.loadState(damaged));
    refuses(IllegalArgumentException.class, "no state", () -> copy.state("x"));
    refuses(IllegalArgumentException.class, "there are 2 inputs, not 1", () -> copy.step(new float[32]));
    refuses(IllegalArgumentException.class, "cannot have this length", () -> { while (true) step(copy, 12); });
    copy.loadState(Files.readAllBytes(Paths.get(words[0])));
    require(copy.dropped() == 3);
    for (float value : step(copy, 4)) made.putFloat(value);
    sample(copy);
    copy.reset();
    require(copy.length() == 0 && copy.dropped() == 0);
    for (float value : step(copy, 5)) made.putFloat(value);
    copy.close();
    refuses(IllegalStateException.class, "closed", () -> copy.length());
    Files.write(Paths.get(words[2]), Arrays.copyOf(made.array(), made.position()));
  }
}
"""


@pytest.mark.slow
@needs_java
def test_java_takes_steps(tmp_path: Path) -> None:
    """Steps, states and saved states are those of a session, to the bit; forks go on after the original is closed."""
    cached = write_library(tmp_path)
    made = android.java_class("cached")
    triple = str(exports.target().tvm["mtriple"])
    model = DescribedModel("cached", cached.signature, (), triple)
    compiled = {path.name: path for path in cached.folder.glob("*.o")}
    compiled[c_runtime.PROGRAM] = cached.folder / "compiled.c"
    library = tmp_path / "libcached.so"
    c_runtime.link(model, compiled, library, java=made)
    session = cached.load(library).session()

    def step(seq: int) -> Array:
        x = (np.arange(32 * seq) % 13 / 16 - 0.5).astype(np.float32).reshape(1, seq, 32)
        return session.run({"x": x, "mask": np.ones((1, session.length + seq), np.float32)})["y"]

    step(9)
    session.drop(3)
    (tmp_path / "python").write_bytes(session.save())
    (tmp_path / f"{made.name}.java").write_text(android.write_class(model, made))
    (tmp_path / "Main.java").write_text(STATES)
    compile_java(tmp_path, made)
    done = run_java(tmp_path, "python", "saved", "made")
    assert done.returncode == 0, done.stdout + done.stderr

    session.reset()
    expected = [step(seq) for seq in (5, 2, 12)]
    expected += session.states.values()
    assert (tmp_path / "saved").read_bytes() == session.save()
    expected.append(step(2))
    session.drop(9)
    expected.append(session.states["past_value"])
    session.load((tmp_path / "python").read_bytes())
    expected.append(step(4))
    session.reset()
    expected.append(step(5))
    assert (tmp_path / "made").read_bytes() == b"".join(array.tobytes() for array in expected)


def test_the_class_calls_nothing_that_is_newer_than_its_android() -> None:
    """Streams and exact products came with API 24: a class for API 21 that calls them ends the app on Android 5 and 6."""
    newer = r"stream|Stream|Exact|Optional|getOrDefault|computeIfAbsent|List\.of|String\.join|java\.time"
    folder = Path(android.__file__).parent
    text = "".join(path.read_text() for path in folder.glob("*.java"))
    calls = re.sub(r"//.*|/\*(?s:.*?)\*/", "", text)
    assert re.findall(newer, calls) == []


@pytest.mark.slow
@needs_java
def test_java_compiles_with_hostile_names(tmp_path: Path) -> None:
    """Names are strings of Java: none ends one, and the class has each as it is."""
    names = draw_names(3, 60)
    tensors = [{"name": name, "shape": [1, 3], "dtype": "float32"} for name in names]
    signature = {"inputs": tensors[::2], "outputs": tensors[1::2]}
    model = DescribedModel("3d.static-class", signature, (), "aarch64-linux-android21")
    made = android.java_class(model.name)
    assert made == ("tvmflow.models", "M3dStaticClassModel")
    text = android.write_class(model, made).replace("System.loadLibrary", "String.valueOf")
    (tmp_path / f"{made.name}.java").write_text(text)
    main = f"""
        public class Main {{
          public static void main(String[] words) throws Exception {{
            for (tvmflow.models.{made.name}.Tensor tensor : tvmflow.models.{made.name}.INPUTS)
              System.out.write((tensor.name + "\\n").getBytes("UTF-8"));
            System.out.flush();
          }}
        }}"""
    (tmp_path / "Main.java").write_text(main)
    files = [f"{made.name}.java", "Main.java"]
    subprocess.run([str(JAVAC), "-d", ".", *files], cwd=tmp_path, check=True)
    java = str(Path(str(JAVAC)).with_name("java"))
    done = subprocess.run([java, "Main"], cwd=tmp_path, capture_output=True, check=True)
    assert done.stdout.decode().split("\n")[:-1] == names[::2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("triple", "abi"),
    [
        ("aarch64-linux-android21", "arm64-v8a"),
        ("armv7a-linux-androideabi21", "armeabi-v7a"),
        ("x86_64-linux-android21", "x86_64"),
    ],
)
def test_a_library_needs_nothing_that_android_5_lacks(
    tmp_path: Path, triple: str, abi: str
) -> None:
    """It takes functions of bionic alone, loads with pages of 16 KB, and shows the header's functions and Java's."""
    made = exports.make(tmp_path / "digits", "digits", "android", triple=triple).dist
    module = made / "digits-android"
    library = module / f"src/main/jniLibs/{abi}/libdigits.so"
    symbols = subprocess.run(
        ["readelf", "-W", "--dyn-syms", library], capture_output=True, text=True, check=True
    ).stdout
    rows = [line.split() for line in symbols.splitlines() if re.match(r" +[1-9]\d*:", line)]
    header = (ROOT / "tvmflow/targets/c_runtime/android.h").read_text()
    needed = {row[7] for row in rows if row[6] == "UND"}
    assert needed <= {*re.findall(r"\b(\w+)\(", header), "memmove", "memcmp", "strlen", "floorf"}, (
        needed
    )
    given = {row[7] for row in rows if row[6] != "UND"}
    declared = re.findall(
        r"DIGITS_API [\w ]+?\*?(digits_\w+)\(",
        (module / "src/main/cpp/include/digits.h").read_text(),
    )
    natives = re.findall(
        r"native [\w\[\]]+ (\w+)\(",
        (module / "src/main/java/tvmflow/models/DigitsModel.java").read_text(),
    )
    assert given == {*declared, *(f"Java_tvmflow_models_DigitsModel_{name}" for name in natives)}
    segments = subprocess.run(
        ["readelf", "-lW", library], capture_output=True, text=True, check=True
    ).stdout
    loaded = [line.split() for line in segments.splitlines() if line.startswith("  LOAD")]
    assert {row[-1] for row in loaded} == {"0x4000"} and "TLS" not in segments
    others = {
        path.relative_to(module): path.read_bytes()
        for path in module.rglob("*")
        if path.is_file() and path != library
    }
    assert len(others) == 6 and not any(triple.encode() in content for content in others.values())


def test_only_android_has_a_module() -> None:
    """The reason names presets."""
    reason = android.unsupported_reason(ExportRequest("net", "1", "x", "llvm", "x86_64-linux-gnu"))
    assert reason == "x86_64-linux-gnu is not Android: name presets such as android-arm64-v8a"

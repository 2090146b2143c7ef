"""`android`: what its libraries need of Android, and its class of Java on this machine's JVM with a library of the same C code."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.support import exports
from tests.support.exports import Exported
from tests.support.hostile_names import draw_names
from tests.support.recipes import ROOT
from tvmflow.exporters import android
from tvmflow.exporters.exporter import ExportRequest
from tvmflow.targets import c_runtime, form_names
from tvmflow.targets.c_runtime import DescribedModel

JAVAC = shutil.which("javac")
needs_java = pytest.mark.skipif(JAVAC is None, reason="needs a JDK (javac)")

MAIN = """
import java.nio.*;
import java.nio.file.*;
import tvmflow.models.DigitsModel;

public class Main {
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
    refuses(IllegalArgumentException.class, "the model has 1 inputs", () -> model.run(image, image));
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
    files = [f"{made.name}.java", "Main.java"]
    options = ["--release", "8", "-Xlint:all,-options", "-Werror"]
    subprocess.run([str(JAVAC), *options, "-d", ".", *files], cwd=tmp_path, check=True)
    java = str(Path(str(JAVAC)).with_name("java"))
    command = [java, "-Xcheck:jni", "-Djava.library.path=.", "Main", "images", "scores"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "data 10"), done.stdout + done.stderr
    scores = np.fromfile(tmp_path / "scores", "float32").reshape(-1, 10)
    np.testing.assert_allclose(scores, exports.reference(exported), rtol=1e-4, atol=1e-5)


def test_the_class_calls_nothing_that_is_newer_than_its_android() -> None:
    """Streams and exact products came with API 24: a class for API 21 that calls them ends the app on Android 5 and 6."""
    newer = r"stream|Stream|Exact|Optional|getOrDefault|computeIfAbsent|List\.of|String\.join|java\.time"
    text = (Path(android.__file__).parent / "Model.java").read_text()
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

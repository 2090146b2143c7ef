"""One counted call of ncnn or LiteRT on one thread, after one that is not counted, in a Python for ARM.

python peers.py ncnn MODULES PARAM BIN INPUT OUTPUT PRECISION SIZE...
python peers.py litert MODULES MODEL INPUT OUTPUT

Files have raw numbers, those of ncnn float32. Modules are the unpacked wheels."""

import ctypes
import sys
from pathlib import Path


def call_counted(call):
    """Return the result of the second of two calls, which the plugin counts."""
    steer = ctypes.CDLL(None).syscall
    call()
    steer(4095, 1)
    result = call()
    steer(4095, 2)
    return result


def run_ncnn(param, weights, source, precision, *sizes):
    """Return the numbers of the first output."""
    import ncnn

    net = ncnn.Net()
    net.opt.num_threads = 1
    net.opt.use_vulkan_compute = False
    narrow = precision == "float16"
    net.opt.use_fp16_packed = net.opt.use_fp16_storage = net.opt.use_fp16_arithmetic = narrow
    net.opt.use_bf16_storage = precision == "bfloat16"
    net.load_param(param)
    net.load_model(weights)
    numbers = memoryview(Path(source).read_bytes())
    data = ncnn.Mat(numbers.cast("f", list(map(int, sizes))))

    def call():
        extractor = net.create_extractor()
        extractor.input("in0", data)
        status, result = extractor.extract("out0")
        assert status == 0, status
        return result

    return memoryview(call_counted(call)).tobytes()


def run_litert(model, source):
    """Return the first output's numbers."""
    import numpy as np
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(model, num_threads=1)
    interpreter.allocate_tensors()
    (given,) = interpreter.get_input_details()
    data = np.fromfile(source, given["dtype"]).reshape(given["shape"])
    interpreter.set_tensor(given["index"], data)
    call_counted(interpreter.invoke)
    return interpreter.get_tensor(interpreter.get_output_details()[0]["index"]).tobytes()


if __name__ == "__main__":
    library, modules, *arguments = sys.argv[1:]
    sys.path.insert(0, modules)
    if library == "ncnn":
        param, weights, source, output, *rest = arguments
        numbers = run_ncnn(param, weights, source, *rest)
    else:
        model, source, output = arguments
        numbers = run_litert(model, source)
    Path(output).write_bytes(numbers)

"""Random small ONNX graphs of one operator each, compared with ONNX Runtime and the ONNX reference evaluator."""

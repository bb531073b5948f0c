"""Weights out of the files that packages keep them in: CTranslate2, ONNX, ONNX Runtime."""

from __future__ import annotations

import importlib.util
import struct
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

#: Types of elements: CTranslate2's numbers (its file of format 4 on), ONNX's.
CTRANSLATE2_TYPES = {0: np.float32, 1: np.int8, 2: np.int16, 3: np.int32, 4: np.float16}
ONNX_TYPES = {1: np.float32, 2: np.uint8, 3: np.int8, 6: np.int32, 7: np.int64, 9: np.bool_, 10: np.float16}


def read_ctranslate2(data: bytes) -> dict[str, np.ndarray]:
    """Return name -> array of a CTranslate2 model; aliases stand for what they name.

    Raises:
        ValueError: if the format is older than 4, or something is left over.
    """
    place = 0

    def number(kind: str) -> int:
        nonlocal place
        (value,) = struct.unpack_from(f"<{kind}", data, place)
        place += struct.calcsize(kind)
        return value

    def text() -> str:
        nonlocal place
        length = number("H")
        place += length
        return data[place - length : place].rstrip(b"\0").decode()

    if (version := number("I")) < 4:
        raise ValueError(f"a CTranslate2 model of format {version} cannot be read: format 4 or newer is needed.")
    text(), number("I")  # the kind of model and its revision
    arrays = {}
    for _ in range(number("I")):
        name = text()
        shape = [number("I") for _ in range(number("B"))]
        dtype = np.dtype(CTRANSLATE2_TYPES[number("B")])
        size = number("I")
        arrays[name] = np.frombuffer(data, dtype, size // dtype.itemsize, place).reshape(shape)
        place += size
    for _ in range(number("I")):
        alias = text()
        arrays[alias] = arrays[text()]
    if place != len(data):
        raise ValueError(f"{len(data) - place} bytes of the CTranslate2 model were not understood: is a part missing?")
    return arrays


class Graph:
    """One graph of an ONNX model.

    Attributes:
        arrays: its weights by name.
        products: the products with a weight quantised to 8 bits, as (names that may say which layer it is, name of the weight).
    """

    def __init__(self, arrays: Mapping[str, np.ndarray], nodes: list[tuple[str, list[str], list[str]]]) -> None:
        self.arrays = arrays
        self.products = []
        for name, inputs, outputs in nodes:
            weights = [i.removesuffix("_quantized") for i in inputs if i.endswith("_quantized") and i in arrays]
            names = [text for text in (name, *outputs) if "MatMul" in text]
            if names and len(weights) == 1:
                self.products.append((names, weights[0]))

    def dequantized(self, name: str) -> np.ndarray:
        """Return a weight as float32, from its integers, zero point and scale."""
        integers, zero, scale = (
            self.arrays[f"{name}_{part}"].astype(np.float32) for part in ("quantized", "zero_point", "scale")
        )
        return (integers - zero) * scale


def read_onnx(path: Path) -> Graph:
    """Return the main graph of an ONNX file; it needs the package onnx."""
    import onnx

    graph = onnx.load(path).graph
    arrays = {array.name: onnx.numpy_helper.to_array(array) for array in graph.initializer}
    return Graph(arrays, [(node.name, list(node.input), list(node.output)) for node in graph.node])


def read_ort(path: Path) -> Iterator[tuple[str, Graph]]:
    """Return all graphs of an ONNX Runtime file with the branch that they are; it needs the package onnxruntime."""
    spec = importlib.util.find_spec("onnxruntime")
    if spec is None or spec.origin is None:
        raise RuntimeError("moonshine is packed for ONNX Runtime, which reads it: pip install onnxruntime")
    sys.path.append(str(Path(spec.origin).parent / "tools" / "ort_format_model"))
    try:
        from ort_flatbuffers_py.fbs.AttributeType import AttributeType
        from ort_flatbuffers_py.fbs.InferenceSession import InferenceSession
    finally:
        sys.path.pop()

    def walk(graph: Any, branch: str) -> Iterator[tuple[str, Graph]]:
        tensors = [graph.Initializers(i) for i in range(graph.InitializersLength())]
        arrays = {
            t.Name().decode(): np.frombuffer(t.RawDataAsNumpy().tobytes(), ONNX_TYPES[t.DataType()]).reshape(
                [t.Dims(i) for i in range(t.DimsLength())]
            )
            for t in tensors
            if t.RawDataLength()
        }
        nodes, inner = [], []
        for node in (graph.Nodes(i) for i in range(graph.NodesLength())):
            inputs = [node.Inputs(i).decode() for i in range(node.InputsLength())]
            outputs = [node.Outputs(i).decode() for i in range(node.OutputsLength())]
            nodes.append(((node.Name() or b"").decode(), inputs, outputs))
            attributes = [node.Attributes(i) for i in range(node.AttributesLength())]
            inner += [(a.Name().decode(), a.G()) for a in attributes if a.Type() == AttributeType.GRAPH]
        yield branch, Graph(arrays, nodes)
        for name, part in inner:
            yield from walk(part, name)

    return walk(InferenceSession.GetRootAsInferenceSession(path.read_bytes(), 0).Model().Graph(), "")

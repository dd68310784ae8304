"""Build the stand-ins of the CUDA libraries: python build.py INCLUDE OUTPUT

INCLUDE is a folder with the headers of CUDA 13. The environment has onnxruntime-gpu. Each library
gets the functions that its CUDA provider calls: those of `NAME.cpp`, and for all others a
function that returns 0, which is success.
"""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

SOURCES = Path(__file__).parent
# the file of each library, and the beginning of the names of its functions
LIBRARIES = {
    "cudart": ("libcudart.so.13", r"(__)?cuda[A-Z]"),
    "cublas": ("libcublas.so.13", r"cublas(?!Lt)"),
    "cublasLt": ("libcublasLt.so.13", r"cublasLt"),
    "cudnn": ("libcudnn.so.9", r"cudnn[A-Z]"),
    "curand": ("libcurand.so.10", r"curand"),
    "cuda": ("libcuda.so.1", r"cu[A-Z]"),
}
COMPILE = ["g++", "-shared", "-fPIC", "-O1", "-std=c++17", "-Wall", "-Wno-unused-function"]


def provider_functions() -> set[str]:
    """Return the names of the functions that the provider links, or looks up when it runs."""
    folder = Path(find_spec("onnxruntime").origin).parent / "capi"
    provider = folder / "libonnxruntime_providers_cuda.so"
    command = ["nm", "-D", "--undefined-only", "--without-symbol-versions", provider]
    linked = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    # cuDNN is opened at run time
    looked_up = re.findall(rb"\0(cudnn[A-Z]\w+)(?=\0)", provider.read_bytes())
    return {line.split()[-1] for line in linked.splitlines()} | {
        name.decode() for name in looked_up
    }


def stubs(names: list[str]) -> str:
    """Return C++ code of functions that return 0. Those of cuBLAS and cuDNN write their names to
    the log."""
    functions = []
    for name in names:
        call = f'cuda_dry_trace("{name}"); ' if name.startswith(("cublas", "cudnn")) else ""
        functions.append(f"int {name}() {{ {call}return 0; }}")
    return "\n".join(['#include "trace.h"', 'extern "C" {', *functions, "}\n"])


def build(name: str, functions: set[str], include: str, output: Path) -> None:
    """Compile one library of `LIBRARIES` to `output`."""
    file, pattern = LIBRARIES[name]
    sources = [path for path in SOURCES.glob("*.cpp") if path.stem == name]
    code = "".join(path.read_text() for path in sources)
    missing = [
        function
        for function in sorted(functions)
        if re.match(pattern, function) and not re.search(rf"\b{function}\(", code)
    ]
    others, versions = output / f"{name}.cpp", output / f"{name}.map"
    others.write_text(stubs(missing))
    versions.write_text(f"{file} {{ *; }};\n")  # symbols have the version that the provider expects
    options = [f"-I{SOURCES}", f"-I{include}", f"-Wl,--version-script={versions},-soname,{file}"]
    linked = [] if name == "cudart" else [output / "libcudart.so.13"]
    command = [*COMPILE, *options, "-o", output / file, *sources, others, *linked]
    subprocess.run(command, check=True)


def main(include: str, output: str) -> None:
    functions = provider_functions()
    Path(output).mkdir(parents=True, exist_ok=True)
    for name in LIBRARIES:
        build(name, functions, include, Path(output))


if __name__ == "__main__":
    main(*sys.argv[1:])

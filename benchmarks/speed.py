"""Speed, measured: `python benchmarks/speed.py` writes benchmarks/results/cpu-amx.json,
cpu-vnni.json or cpu-avx2.json, by what the processor has, and reports it; `--device cuda`
cuda.json.

The same seeded weights, the same inputs and the same forced number of tokens in every engine. On a
CPU: transformers, CTranslate2, OpenVINO, llama.cpp and our exports, those of them that are
installed, each in its fastest arrangement of threads, with memory; and sentences a second over the
lines of a file. On a GPU: transformers, our models in torch, their decode step as one CUDA graph,
and our exports, in half precision, with the time in kernels; then texts of mixed length, the shapes
of BART-large-CNN and of Flan-T5-XL, `verify` and BLEU. A run of a few minutes (`--minutes`) writes
each result as it comes, the most valuable first; `--resume --files DIR` goes on with what the file
lacks. Nothing is downloaded, and our packages are those of this checkout where they are not
installed.
"""

import argparse
import os
import tempfile
from pathlib import Path

import report
import speed_results
from checkout import make_importable
from measure import instructions
from measure_cpu import CpuBenchmark
from measure_cuda import CudaBenchmark
from plan import PLANS

BENCHMARKS = {"cpu": CpuBenchmark, "cuda": CudaBenchmark}


def parse(arguments):
    chooser = argparse.ArgumentParser(add_help=False)
    chooser.add_argument(
        "--device", choices=PLANS, default="cpu", help="device to run the models on (cpu)"
    )
    device = chooser.parse_known_args(arguments)[0].device
    name = f"cpu-{speed_results.processor(instructions())}" if device == "cpu" else device
    plan, out = PLANS[device], speed_results.RESULTS / f"{name}.json"
    parser = argparse.ArgumentParser(
        description=__doc__, parents=[chooser], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, values in (("shape", list(plan.shapes)), ("engine", list(plan.engines))):
        parser.add_argument(
            f"--{name}s",
            nargs="+",
            choices=values,
            default=values,
            metavar=name.upper(),
            help=", ".join(values),
        )
    parser.add_argument(
        "--repeats", type=int, default=5, help="measured rounds, after a warm-up (5)"
    )
    parser.add_argument(
        "--threads",
        type=int,
        default=plan.threads,
        help=f"maximum number of threads of an engine ({plan.threads})",
    )
    parser.add_argument(
        "--quick", action="store_true", help="tiny models, to test the benchmark itself"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=plan.minutes,
        help=f"minutes after which no measurement starts ({plan.minutes})",
    )
    parser.add_argument("--out", type=Path, default=out, help="output file, JSON")
    parser.add_argument(
        "--files",
        type=Path,
        metavar="DIR",
        help="folder that keeps the files of engines between runs; delete it after a change",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="resume the run of the output file: measure only what it lacks",
    )
    if device == "cpu":
        parser.add_argument(
            "--captions",
            type=Path,
            metavar="FILE",
            help="text file with one sentence per line, plain or gzip, to translate",
        )
    else:
        parser.add_argument(
            "--texts",
            type=Path,
            nargs=2,
            metavar=("SOURCE", "TARGET"),
            help="text for the BLEU of the shipped model",
        )
    return parser.parse_args(arguments), plan


def main(arguments=None):
    options, plan = parse(arguments)
    os.environ |= {
        "OMP_NUM_THREADS": str(options.threads),
        "HF_HUB_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as root, tempfile.TemporaryDirectory() as packages:
        make_importable(Path(packages))
        BENCHMARKS[options.device](options, plan, options.files or Path(root)).run()
    report.main(options.out)


if __name__ == "__main__":
    main()

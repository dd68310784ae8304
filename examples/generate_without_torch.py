"""Translation or continuation of texts in a process that never imports torch.

    python examples/generate_without_torch.py CHECKPOINT EXPORT "A dog runs." --num-beams 4

The export is made by the command, in a separate process, which needs torch. An existing EXPORT is
reused.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from vanilla_transformer_export import TextRuntime


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", help="directory or Hub id")
    parser.add_argument("export", type=Path, help="directory of the export")
    parser.add_argument("text", nargs="+", help="what to translate or continue")
    parser.add_argument(
        "--num-beams", type=int, help="1 is greedy; the checkpoint's own setting if not given"
    )
    args = parser.parse_args(argv)

    if not args.export.exists():
        command = [
            sys.executable,
            "-m",
            "vanilla_transformer_export",
            "export",
            args.checkpoint,
            str(args.export),
        ]
        subprocess.run([*command, "--target", "cpu", "--dtype", "int8"], check=True)

    runtime = TextRuntime(args.export)
    options = {} if args.num_beams is None else {"num_beams": args.num_beams}
    for text in args.text:
        print(text, "->", runtime.generate([text], **options)[0])
    print("torch is imported:", "torch" in sys.modules)


if __name__ == "__main__":
    main()

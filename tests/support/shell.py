"""The parsing of shell commands that a text shows."""

import subprocess
from pathlib import Path

from accelerate.commands.launch import launch_command_parser
from torch.distributed.run import get_args_parser as torchrun_parser

LAUNCH = Path(__file__).parents[2] / "vanilla_transformer" / "training" / "launch" / "slurm.sh"
MODULES = ("vanilla_transformer_export", "vanilla_transformer_export.cli.main")
PROGRAMS = (
    "vanilla-transformer",
    "torchrun",
    "accelerate",
    "sbatch",
    "python",
    "make",
    "pip",
    "git",
)
RAYS = "serve"  # also a program, but in our pages mostly our own verb


def commands(script: str, folder: Path) -> list[list[str]]:
    """Run `script` in `folder`, and return its calls of `PROGRAMS` and `RAYS`, each a list of
    words.

    These programs only record their arguments. Other commands run.
    """
    shims, log = folder / "shims", folder / "calls"
    shims.mkdir(exist_ok=True)
    for program in (*PROGRAMS, RAYS):
        shim = shims / program
        shim.write_text(
            '#!/bin/sh\nprintf "%s\\0" "$(basename "$0")" "$@" >> "$CALLS"\nprintf "\\n\\0" >> '
            '"$CALLS"\n'
        )
        shim.chmod(0o755)
    log.touch()
    environment = {"PATH": f"{shims}:/usr/bin:/bin", "CALLS": str(log)}
    subprocess.run(["bash", "-euc", script], cwd=folder, env=environment, check=True)
    calls = log.read_text().split("\0\n\0")[:-1]
    log.unlink()
    return [call.split("\0") for call in calls]


def ours(call: list[str]) -> list[str]:
    """Return the arguments of `vanilla-transformer` in `call`, even if another program starts
    it."""
    program, *arguments = call
    if program == "sbatch":
        script = next(
            index for index, argument in enumerate(arguments) if argument.endswith("slurm.sh")
        )
        assert Path(arguments[script]).name == LAUNCH.name and LAUNCH.is_file()
        assert any(f'{module} train "$@"' in LAUNCH.read_text() for module in MODULES)
        return ["train", *arguments[script + 1 :]]
    if program == "vanilla-transformer":
        return arguments
    assert program == "torchrun" or (program, arguments.pop(0)) == ("accelerate", "launch")
    read = (torchrun_parser() if program == "torchrun" else launch_command_parser()).parse_args(
        arguments
    )
    assert (
        read.training_script in MODULES
        if read.module
        else Path(read.training_script).name == "vanilla-transformer"
    )
    return read.training_script_args

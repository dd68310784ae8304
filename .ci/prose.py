"""Check the docstrings and names of Python files: python .ci/prose.py [PATH...]

Without paths the folders of the project are checked. Each finding is printed as file:line: finding,
and the exit status is 1 if there are any. Names are checked outside of tests/ only.
"""

import ast
import re
import sys
from pathlib import Path

FOLDERS = ("export", "vanilla_transformer", "benchmarks", "examples", "tests")
MAX_WORDS = 25  # to the first full stop or colon of a docstring

# A docstring begins with a verb or a noun. These words begin a fragment that needs the code.
FRAGMENT_WORDS = {
    *("As", "Behind", "By", "For", "From", "How", "In", "Of", "On", "Than", "That", "Those", "To"),
    *("What", "Where", "Whether", "Which", "With"),
}
# These names say nothing of what they hold or return.
BANNED_NAMES = {
    *("begun", "chosen", "described", "each", "found", "given", "least", "listed", "made", "most"),
    *("named", "news", "own", "said", "shown", "taken", "told", "wanted", "whole"),
}

DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def check_docstring(docstring: str) -> str | None:
    """Return what is wrong with the first sentence of `docstring`, or None."""
    sentence = re.split(r"(?<=[.:])\s", " ".join(docstring.split("\n\n")[0].split()))[0]
    words = sentence.split()
    if not words:
        return "the docstring is empty"
    if words[0].strip("`,.:") in FRAGMENT_WORDS:
        return f"the docstring begins with {words[0]}, expected a verb or a noun"
    if len(words) > MAX_WORDS:
        return f"the docstring has {len(words)} words to its first stop, expected {MAX_WORDS}"
    return None


def bound_name(node: ast.AST) -> str | None:
    """Return the name that `node` defines, assigns or imports, or None."""
    if isinstance(node, (*FUNCTIONS, ast.ClassDef, ast.ExceptHandler)):
        return node.name
    if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
        return node.id if isinstance(node, ast.Name) else node.attr
    return node.arg if isinstance(node, ast.arg) else getattr(node, "asname", None)


def check_name(node: ast.AST) -> str | None:
    """Return what is wrong with the name that `node` binds, or None."""
    name = bound_name(node)
    if name and name.strip("_").lower() in BANNED_NAMES:
        return f"the name {name} says nothing, expected what it holds or returns"
    if name and isinstance(node, FUNCTIONS) and name.endswith("_of"):
        return f"the function {name} ends with _of, expected what it returns"
    return None


def findings(source: str, names: bool = True) -> list[tuple[int, str]]:
    """Return the line and the text of each finding in `source`, with those of names if `names`."""
    problems = []
    for node in ast.walk(ast.parse(source)):
        docstring = ast.get_docstring(node) if isinstance(node, DOCUMENTED) else None
        problem = check_docstring(docstring) if docstring is not None else None
        for text in (problem, check_name(node) if names else None):
            if text:
                problems.append((getattr(node, "lineno", 1), text))
    return sorted(problems)


def main(paths: list[str]) -> int:
    """Print the findings of the files at and below `paths`, and return the exit status."""
    count = 0
    for root in map(Path, paths or FOLDERS):
        for path in [root] if root.is_file() else sorted(root.rglob("*.py")):
            if "node_modules" in path.parts:
                continue
            for line, text in findings(path.read_text("utf-8"), names="tests" not in path.parts):
                print(f"{path}:{line}: {text}")
                count += 1
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

#!/usr/bin/env python3
"""Weigh the code: lines by kind per package, and what `mezo train` enters before its first step.

    python ../shared/weigh.py              sizes of mezo_cli, tests, scripts, words of docs (in a checkout, tracked files)
    PYTHON ../shared/weigh.py --way        functions and files of mezo_cli entered before the first step of experiment=demo
                                           (PYTHON: of the environment in which mezo is installed)
Kinds: code (no blank, comment, docstring or import line), docstrings, imports, comments, blank. Statements and lambdas say
whether lines became denser.
"""

import ast
import collections
import inspect
import os
import subprocess
import sys
import tempfile
import threading


def kinds(path):
    text = open(path, encoding="utf-8").read()
    tree, doc, imports = ast.parse(text), set(), set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and ast.get_docstring(node) is not None:
            doc.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            imports.update(range(node.lineno, node.end_lineno + 1))
    counts = collections.Counter(
        statements=sum(isinstance(node, ast.stmt) for node in ast.walk(tree)),
        lambdas=sum(isinstance(node, ast.Lambda) for node in ast.walk(tree)),
    )
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        kind = (
            "docstrings" if number in doc else "blank" if not stripped else "comments" if stripped.startswith("#")
            else "imports" if number in imports else "code"
        )
        counts[kind] += 1
    return counts


KINDS = ("code", "docstrings", "imports", "comments", "blank")


def lines_of(counts):
    return sum(counts[kind] for kind in KINDS)


def sizes():
    for top in ("mezo_cli", "tests", "scripts"):
        files = subprocess.check_output(["git", "ls-files", f"{top}/*.py"], text=True).split()
        total, parts = collections.Counter(), collections.defaultdict(collections.Counter)
        for path in files:
            counts = kinds(path)
            total += counts
            parts[path.split("/")[1]] += counts
        print(f"{top}: {lines_of(total)} lines in {len(files)} files, {total['code']} of them code: {dict(total)}")
        if top == "mezo_cli":
            for name, counts in sorted(parts.items(), key=lambda item: -lines_of(item[1])):
                print(f"  {lines_of(counts):6d} {counts['code']:6d} code  {name}")
    tracked = subprocess.check_output(["git", "ls-files"], text=True).split("\n")
    pages = [name for name in tracked if name.endswith(".md") and name not in ("CHANGELOG.md",) and not name.startswith("mezo_cli/demo/")]
    print("docs and README:", sum(len(open(page, encoding="utf-8").read().split()) for page in pages), "words in", len(pages), "pages")
    left = ("docs/", "tests/", "scripts/", "mezo_cli/demo/", "LICENSE", "CHANGELOG.md", "constraints")
    other = [name for name in tracked if name and not name.endswith((".md", ".png", ".svg", ".safetensors")) and not name.startswith(left) and not (name.endswith(".py") and name.startswith("mezo_cli/"))]
    print("all other text:", sum(open(name, "rb").read().count(b"\n") for name in other), "lines in", len(other), "files")


def way():
    sys.path.insert(0, os.getcwd())
    import mezo_cli

    base, entered, before = os.path.dirname(mezo_cli.__file__) + os.sep, set(), {}

    def profile(frame, event, arg):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(base) and not before:
            if code.co_name == "step" and f"{os.sep}optim{os.sep}" in code.co_filename:  # the one that the loop calls
                before["functions"] = len(entered); before["list"] = sorted(entered)
                before["files"] = len({name for name, _, _ in entered})
            elif code.co_flags & inspect.CO_OPTIMIZED and code.co_name not in ("<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>"):
                entered.add((code.co_filename, code.co_name, code.co_firstlineno))

    folder = tempfile.mkdtemp()
    sys.argv = ["mezo", "train", "task=sst2", "objective=mlm", "experiment=demo", "steps=2", "eval_every=2", f"hydra.run.dir={folder}/run"]
    from mezo_cli.__main__ import main

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        main()
    except SystemExit:
        pass
    finally:
        sys.setprofile(None)
    if not before:
        sys.exit("no step was taken")
    [print("ENT", n.replace(base,""), f, file=sys.stderr) for n, f, _ in before["list"]]
    print(f"mezo train enters {before['functions']} functions in {before['files']} files of mezo_cli before the first step", file=sys.stderr)


if __name__ == "__main__":
    way() if "--way" in sys.argv else sizes()

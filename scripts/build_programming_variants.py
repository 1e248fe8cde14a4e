"""Write the programming files derived from human_eval.jsonl: parts of the solution moved into the prompt.

    python scripts/build_programming_variants.py [--folder eval_data/programming]

human_eval-0.25, -0.5 and -0.75 move that share of the solution's lines to the end of the prompt. As in llm-foundry's
files, the solution starts with the line end after the last line that was moved, even if none was.
human_eval_return_simple and human_eval_return_complex leave only the last `return` line to generate, a bare name or
anything else; the line end before it is in neither the prompt nor the solution, as in llm-foundry's files.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
from pathlib import Path
from typing import Any

Row = dict[str, Any]

SHARES = (0.25, 0.5, 0.75)


def with_share(row: Row, share: float) -> Row:
    """Return the row with the first share of its solution's lines in the prompt, and a line end before the others."""
    lines = row['canonical_solution'].splitlines()
    moved = math.floor(len(lines) * share)
    rest = ''.join(f'\n{line}' for line in lines[moved:]) + '\n'
    return {**row, 'prompt': row['prompt'] + '\n'.join(lines[:moved]), 'canonical_solution': rest}


def return_line(row: Row) -> str | None:
    """Return the last line of the solution with its line end if it is the function's last `return`, else None."""
    line = row['canonical_solution'].splitlines(keepends=True)[-1]
    last = ast.parse(row['prompt'] + row['canonical_solution']).body[-1].body[-1]
    return line if isinstance(last, ast.Return) and last.lineno == last.end_lineno else None


def with_return_only(row: Row, line: str) -> Row:
    """Return the row with all of its solution except the return line in the prompt."""
    before = row['canonical_solution'].removesuffix(line)
    return {**row, 'prompt': (row['prompt'] + before).removesuffix('\n'), 'canonical_solution': line}


def returns_name(line: str) -> bool:
    """Return whether a return line returns a bare name, which None, True and False are not."""
    statement = ast.parse(f'def function():\n {line.strip()}').body[0].body[0]
    return isinstance(statement.value, ast.Name)


def derived_files(rows: list[Row]) -> dict[str, str]:
    """Return the text of every derived file by its name."""
    files = {f'human_eval-{share}.jsonl': [with_share(row, share) for row in rows] for share in SHARES}
    lines = [(row, line) for row in rows if (line := return_line(row)) is not None]
    for kind, bare in (('simple', True), ('complex', False)):
        chosen = [with_return_only(row, line) for row, line in lines if returns_name(line) is bare]
        files[f'human_eval_return_{kind}.jsonl'] = chosen
    return {
        name: ''.join(json.dumps(row, ensure_ascii=False) + '\n' for row in chosen) for name, chosen in files.items()
    }


def read_rows(path: Path) -> list[Row]:
    """Return the objects of a file of JSON lines."""
    with path.open(encoding='utf-8') as lines:
        return [json.loads(line) for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--folder', type=Path, default=Path('eval_data/programming'))
    folder = parser.parse_args().folder
    for name, text in derived_files(read_rows(folder / 'human_eval.jsonl')).items():
        (folder / name).write_text(text, encoding='utf-8')
        print(f'wrote {folder / name}')


if __name__ == '__main__':
    main()

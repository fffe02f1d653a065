"""Check the rows: balance of labels, prompts that are cut, rows that occur twice, empty texts."""

from collections.abc import Iterator, Sequence
from typing import Any

from mezo_cli.config.schema import Example, Splits, TaskConfig, TokenizedExample
from mezo_cli.data import describe
from mezo_cli.diagnosis.deadline import Deadline
from mezo_cli.diagnosis.findings import DOUBT, OK, UNKNOWN, Section, percent
from mezo_cli.diagnosis.prepared import Prepared
from mezo_cli.tasks import InputEncoder
from mezo_cli.tasks.encoder import UNBOUNDED, max_row_length

TITLE = "data"
FEW = 0.005  # share of rows below which duplicates between splits and empty texts do little harm
REPEATED = 0.05  # the same for duplicates inside a split
CUT = 0.01  # the same for prompts that lose text
SMALL_CLASS = 0.2  # of an equal share of the rows
LEAK = 0.95  # of the rows, whose label stands in a column of the prompt
COVERED = 0.99  # of the rows, for the length that is recommended
CHUNK = 2048  # rows encoded between two looks at the clock


def check(prepared: Prepared, splits: Splits, deadline: Deadline) -> Section:
    """Check the rows of all splits."""
    section = Section(TITLE)
    named = _named(splits)
    judge_balance(section, splits, prepared.config.task)
    judge_leak(section, named, prepared.config.task)
    _judge_cut_prompts(section, prepared, named, deadline)
    judge_repeated_rows(section, named)
    judge_shared_rows(section, named)
    judge_empty_texts(section, named, prepared.config.task)
    return section


def judge_balance(section: Section, splits: Splits, task: TaskConfig) -> None:
    """Report the rows per label of each split (as `mezo data` counts them); doubt a label with few or none."""
    counts = {name: one["labels"] for name, one in describe(splits, task).items() if one is not None}
    parts, small = [], []
    for split, labels in counts.items():
        rows = sum(labels.values())
        parts.append(f"{split} {rows:,} ({', '.join(f'{label} {percent(n / rows)}' for label, n in labels.items())})")
        if split != "test":
            least = min(labels, key=lambda label: labels[label])
            if labels[least] < SMALL_CLASS * rows / len(labels):
                small.append(f"'{least}' has {labels[least]:,} of {rows:,} rows in {split}")
    text = "; ".join(small) if small else "rows: " + "; ".join(parts)
    advice = (
        "accuracy hardly counts a label so rare: draw the same number of each (data.shots=K), or use task.metric=f1"
        " and compare with always giving the most frequent label"
    )
    section.judge("balance", bool(small), text, advice, rows=counts)


def judge_leak(section: Section, named: dict[str, Sequence[Example]], task: TaskConfig) -> None:
    """Doubt a column of the prompt that is the label: by its name, or because its texts are the rows' own labels."""
    names = [values for values in (task.labels, task.label_words, task.files.labels) if values]
    spellings = [{_plain(values[label]) for values in names} for label in range(len(task.labels))]
    examples = [example for split in named.values() for example in split]
    label_column = task.rename.get(task.label_column, task.label_column)
    for i, column in enumerate(task.columns):
        told = sum(_plain(example.texts[i]) in spellings[example.label] for example in examples) / len(examples)
        if column == label_column or told > LEAK:
            how = "is the label column" if column == label_column else f"gives the label of {percent(told)} of the rows"
            advice = "take it out of task.template and task.columns: the model would read the answer"
            section.add(DOUBT, "leak", f"the prompt contains the label: '{column}' {how}", advice, column=column)
            return
    section.ok("leak", "no column of the prompt is the label", column=None)


def judge_repeated_rows(section: Section, named: dict[str, Sequence[Example]]) -> None:
    """Report rows whose texts occur before in the same split, and those of them with another label."""
    figures, worst = {}, 0.0
    parts = []
    for split, examples in named.items():
        labels: dict[tuple[str, ...], int] = {}  # texts -> the label of their first row
        other = sum(labels.setdefault(_key(example), example.label) != example.label for example in examples)
        repeated = len(examples) - len(labels)
        share = repeated / max(1, len(examples))
        worst = max(worst, share, other / max(1, len(examples)))
        figures[split] = {"repeated": repeated, "other_label": other, "share": share}
        more = f", {other:,} with another label" if other else ""
        parts.append(f"{split} {repeated:,} ({percent(share)}{more})")
    section.judge(
        "repeated_rows",
        worst > REPEATED,
        f"rows that repeat one of their split: {', '.join(parts)}",
        "remove repeated rows: they count twice, and with two labels they cannot both be learned",
        splits=figures,
    )


def judge_shared_rows(section: Section, named: dict[str, Sequence[Example]]) -> None:
    """Report rows of dev and test that are also in train, or in dev."""
    keys = {split: {_key(example) for example in examples} for split, examples in named.items()}
    figures, parts, doubtful = {}, [], False
    for one, other in (("train", "dev"), ("train", "test"), ("dev", "test")):
        if other not in named:
            continue
        shared = sum(_key(example) in keys[one] for example in named[other])
        share = shared / max(1, len(named[other]))
        doubtful = doubtful or share >= FEW
        figures[f"{other}_in_{one}"] = {"rows": shared, "share": share}
        parts.append(f"{shared:,} of {other}'s in {one} ({percent(share)})")
    section.judge(
        "shared_rows",
        doubtful,
        f"rows that are in two splits: {', '.join(parts)}",
        "remove these rows from train, or the scores on dev and test are too good",
        splits=figures,
    )


def judge_empty_texts(section: Section, named: dict[str, Sequence[Example]], task: TaskConfig) -> None:
    """Report rows of which a text is empty or white space."""
    figures, example = {}, ""
    worst = 0.0
    for split, examples in named.items():
        empty = [one for one in examples if not all(text.strip() for text in one.texts)]
        figures[split] = len(empty)
        worst = max(worst, len(empty) / max(1, len(examples)))
        if empty and not example:
            column = next(name for name, text in zip(task.columns, empty[0].texts, strict=True) if not text.strip())
            example = f"; the first: {empty[0].where or split}, column '{column}'"
    total = sum(figures.values())
    text = f"rows with an empty text: {', '.join(f'{split} {n:,}' for split, n in figures.items())}{example}"
    section.judge(
        "empty_texts",
        worst >= FEW,
        text if total else "no row has an empty text",
        "remove these rows, or fill the column: the model sees a prompt without its sentence",
        rows=figures,
    )


def _judge_cut_prompts(
    section: Section, prepared: Prepared, named: dict[str, Sequence[Example]], deadline: Deadline
) -> None:
    encoder = prepared.session.encoder
    encoded = {"train": prepared.train, "dev": prepared.dev, "test": prepared.test or []}
    end = end_tokens(encoder)
    lengths: list[int] = []
    figures: dict[str, dict[str, int]] = {}
    for split, examples in named.items():
        cut = lost = seen = 0
        for full, row in _with_full(encoder, examples, encoded[split], deadline):
            seen += 1
            lengths.append(len(full.input_ids))
            if len(row.input_ids) < len(full.input_ids):
                cut += 1
                lost += _loses_text(full, row, end)
        figures[split] = {"rows": seen, "of": len(examples), "cut": cut, "lose_text": lost}
        if seen < len(examples):
            section.cut.append(f"the length of {len(examples) - seen:,} of {len(examples):,} {split} prompts")
    judge_cut(section, figures, lengths, encoder)


def judge_cut(section: Section, figures: dict[str, dict[str, int]], lengths: list[int], encoder: InputEncoder) -> None:
    """Judge how many prompts are cut, and what they lose.

    Args:
        section: gets the finding.
        figures: split -> rows seen, of how many, prompts cut, prompts that lose text of a sentence.
        lengths: tokens of every prompt before the cut.
        encoder: gives the limit, and says what a row that is cut loses.
    """
    if not lengths:
        return
    ordered = sorted(lengths)
    covers = ordered[min(len(ordered) - 1, int(COVERED * len(ordered)))]
    rows, of, cut, lost = (sum(one[key] for one in figures.values()) for key in ("rows", "of", "cut", "lose_text"))
    fine, among = (OK, "") if rows == of else (UNKNOWN, f" among the {rows:,} of {of:,} that were looked at")
    longest = f"{ordered[len(ordered) // 2]} tokens in the median, {ordered[-1]} at most"
    numbers: dict[str, Any] = {
        "splits": figures,
        "limit": encoder.max_length,
        "median": ordered[len(ordered) // 2],
        "longest": ordered[-1],
        "covers_99_percent": covers,
    }
    if not cut:
        text = f"no prompt is cut{among}: {longest}; the limit is {encoder.max_length}"
        section.add(fine, "cut_prompts", text, **numbers)
        return
    loses = encoder.when_cut.format(lost=f"{lost:,} ({percent(lost / rows)})")
    section.add(
        DOUBT if lost / rows >= CUT else fine,
        "cut_prompts",
        f"{cut:,} of {rows:,} prompts ({percent(cut / rows)}) are cut at {encoder.max_length} tokens or a sentence's"
        f" own limit: {loses} ({longest})",
        _advice_for_cut(encoder, covers),
        **numbers,
    )


def _advice_for_cut(encoder: InputEncoder, covers: int) -> str:
    task, takes = encoder.task, max_row_length(encoder.tokenizer, UNBOUNDED)
    if encoder.max_length >= takes:
        return f"shorten the texts: the model takes no more than {takes:,} tokens, {covers:,} cover 99% of the prompts"
    sentences = {"first_limit": task.first_limit, "other_limit": task.other_limit}
    limits = [f"{name} {value}" for name, value in sentences.items() if value]
    own = f", with task.{' and '.join(limits)}" if limits else ""
    most = f"; the model takes {takes:,}" if takes < UNBOUNDED else ""
    return f"raise the limits (now {encoder.max_length} tokens{own}{most}): {covers:,} tokens cover 99% of the prompts"


def _with_full(
    encoder: InputEncoder, examples: Sequence[Example], rows: Sequence[TokenizedExample], deadline: Deadline
) -> Iterator[tuple[TokenizedExample, TokenizedExample]]:
    """Yield each row without a limit and as it is, while there is time; the first rows always."""
    unlimited = encoder.without_limits()
    for start in range(0, len(examples), CHUNK):
        if start and not deadline.left:
            return
        part = slice(start, start + CHUNK)
        yield from zip(unlimited.encode_all(examples[part]), rows[part], strict=True)


def end_tokens(encoder: InputEncoder) -> int:
    """Return the number of tokens of the template after the last sentence: two prompts end alike so far."""
    unlimited, columns = encoder.without_limits(), len(encoder.task.columns)
    one, other = (list(unlimited.encode(Example((text,) * columns, 0)).input_ids)[::-1] for text in ("a", "b"))
    return next((i for i, (x, y) in enumerate(zip(one, other, strict=False)) if x != y), 0)


def _loses_text(full: TokenizedExample, row: TokenizedExample, end: int) -> bool:
    """Return whether a row that was cut lost more than tokens of the template at its end."""
    kept, whole = list(row.input_ids), list(full.input_ids)
    return not (whole[: len(kept)] == kept and len(whole) - len(kept) <= end)


def _key(example: Example) -> tuple[str, ...]:
    """Return what two rows with the same texts share: case and white space do not count."""
    return tuple(map(_plain, example.texts))


def _plain(text: str) -> str:
    return " ".join(text.split()).casefold()


def _named(splits: Splits) -> dict[str, Sequence[Example]]:
    named: dict[str, Sequence[Example]] = {"train": splits.train, "dev": splits.dev}
    return named if splits.test is None else named | {"test": splits.test}

"""Check the rows: a label in the prompt, cut prompts, rows that occur twice, empty texts."""

from collections.abc import Mapping, Sequence

from mezo_cli.config.schema import Example, TaskConfig
from mezo_cli.data.splits import row_key, shared_rows
from mezo_cli.diagnosis.findings import DOUBT, OK, Section, percent
from mezo_cli.session.opening import Prepared
from mezo_cli.tasks import ClassificationEncoder

FEW = 0.005  # of the rows; fewer duplicates between splits and empty texts do little harm
REPEATED = 0.05  # the same for duplicates inside a split
CUT = 0.01  # the same for prompts that are cut
LEAK = 0.95  # of the rows, whose label stands in a column of the prompt
COVERED = 0.99  # of the rows, for the length that is recommended
LOOKED_AT = 4096  # rows of a split, evenly spaced, whose prompts are encoded without a limit

Named = Mapping[str, Sequence[Example]]  # split -> its rows


def check(prepared: Prepared) -> Section:
    """Check the rows of all splits."""
    section, encoder = Section("data"), prepared.session.encoder
    if isinstance(encoder, ClassificationEncoder):
        named: Named = {name: getattr(prepared.splits, name) for name in prepared.rows}
        judge_leak(section, named, encoder.task)
        judge_cut_prompts(section, encoder, named)
    else:  # they have no labels
        rows = [row for split in prepared.rows.values() for row in split]
        cut, lengths = sum(row.cut for row in rows), sorted(len(row.input_ids) for row in rows)
        text = (
            f"{cut:,} of {len(rows):,} rows lose the start of their prompt; prompts have {lengths[len(rows) // 2]}"
            f" tokens in the median, {lengths[-1]} at most; the limit with what follows is {encoder.max_length}"
        )
        advice = f"raise {encoder.limit_key}, or shorten the texts"
        section.judge("cut_prompts", cut >= CUT * len(rows), text, advice, cut=cut, of=len(rows), longest=lengths[-1])
        named = {
            split: [Example((encoder.distinct_text(row),), -1) for row in encoded]
            for split, encoded in prepared.rows.items()
        }
    judge_repeated_rows(section, named)
    judge_rows_in_two_splits(section, named)
    if isinstance(encoder, ClassificationEncoder):
        judge_empty_texts(section, named, encoder.task)
    return section


def judge_leak(section: Section, named: Named, task: TaskConfig) -> None:
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
    section.add(OK, "leak", "no column of the prompt is the label", column=None)


def judge_repeated_rows(section: Section, named: Named) -> None:
    """Report rows whose texts occur before in the same split, and those of them with another label."""
    figures, parts, doubtful = {}, [], False
    for split, examples in named.items():
        labels: dict[tuple[str, ...], int] = {}  # texts -> the label of their first row
        other = sum(labels.setdefault(row_key(example), example.label) != example.label for example in examples)
        repeated = len(examples) - len(labels)
        doubtful |= max(repeated, other) > REPEATED * len(examples)
        figures[split] = {"repeated": repeated, "other_label": other, "share": repeated / max(1, len(examples))}
        more = f", {other:,} with another label" if other else ""
        parts.append(f"{split} {repeated:,} ({percent(figures[split]['share'])}{more})")
    advice = "remove repeated rows: they count twice, and with two labels they cannot both be learned"
    text = f"rows that repeat one of their split: {', '.join(parts)}"
    section.judge("repeated_rows", doubtful, text, advice, splits=figures)


def judge_rows_in_two_splits(section: Section, named: Named) -> None:
    """Report rows of dev and test that are also in train, or in dev."""
    figures, parts, doubtful = {}, [], False
    for (first, other), rows in shared_rows(named).items():
        fraction = rows / max(1, len(named[other]))
        doubtful |= fraction >= FEW
        figures[f"{other}_in_{first}"] = {"rows": rows, "share": fraction}
        parts.append(f"{rows:,} of {other}'s in {first} ({percent(fraction)})")
    advice = "remove these rows from train, or the scores on dev and test are too good"
    section.judge("shared_rows", doubtful, f"rows that are in two splits: {', '.join(parts)}", advice, splits=figures)


def judge_empty_texts(section: Section, named: Named, task: TaskConfig) -> None:
    """Report rows of which a text is empty or white space."""
    empty = {split: [row for row in rows if not all(map(str.strip, row.texts))] for split, rows in named.items()}
    text = "no row has an empty text"
    if any(empty.values()):
        split, first = next((split, rows[0]) for split, rows in empty.items() if rows)
        column = next(name for name, value in zip(task.columns, first.texts, strict=True) if not value.strip())
        counts = ", ".join(f"{name} {len(rows):,}" for name, rows in empty.items())
        text = f"rows with an empty text: {counts}; the first: {first.where or split}, column '{column}'"
    doubtful = any(len(empty[split]) >= FEW * max(1, len(rows)) for split, rows in named.items())
    advice = "remove these rows, or fill the column: the model sees a prompt without its sentence"
    section.judge("empty_texts", doubtful, text, advice, rows={split: len(rows) for split, rows in empty.items()})


def judge_cut_prompts(section: Section, encoder: ClassificationEncoder, named: Named) -> None:
    """Encode rows of each split with and without a limit, and judge how many the limits cut."""
    unlimited, cut, lengths = encoder.without_limits(), 0, list[int]()
    for examples in named.values():
        spaced = examples[:: -(-len(examples) // LOOKED_AT) or 1]
        full, kept = ([len(row.input_ids) for row in one.encode_all(spaced)] for one in (unlimited, encoder))
        cut += sum(long > short for long, short in zip(full, kept, strict=True))
        lengths += full
    lengths.sort()
    rows, longest, covers = len(lengths), lengths[-1], lengths[int(COVERED * (len(lengths) - 1))]
    text = (
        f"{cut:,} of {rows:,} prompts ({percent(cut / rows)}) are cut: {lengths[rows // 2]} tokens in the median,"
        f" {longest} at most; the limit is {encoder.max_length}"
    )
    advice = (
        "raise the task's limits (max_length, first_limit, other_limit) as far as the model goes, or shorten the texts:"
        f" {covers:,} tokens cover 99% of the prompts"
    )
    figures = {"cut": cut, "of": rows, "limit": encoder.max_length, "longest": longest, "covers": covers}
    section.judge("cut_prompts", cut >= CUT * rows, text, advice, **figures)


def _plain(text: str) -> str:
    return " ".join(text.split()).casefold()

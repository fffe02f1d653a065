"""Check the label words on dev rows before training: their tokens, what the model itself writes there, what they tell.

A prompt can be biased (nearly all rows get one label) and still informative: then the score of the label words puts
the rows in the right order, only around the wrong threshold, which a few steps of training move. The AUC of the score
tells this from a prompt that says nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mezo_cli.config.schema import TokenizedExample
from mezo_cli.data.fewshot import limit
from mezo_cli.diagnosis.deadline import Deadline
from mezo_cli.diagnosis.findings import DOUBT, NOTE, OK, UNKNOWN, Section, percent
from mezo_cli.diagnosis.prepared import Prepared
from mezo_cli.diagnosis.separation import chance_error, choose_words, separation
from mezo_cli.report.untrained import BASELINES
from mezo_cli.training.baselines import remove_bias
from mezo_cli.training.intervals import wilson
from mezo_cli.training.session import Session
from mezo_cli.training.training_run import not_finite_at_start

TITLE = "label words"
BATCH = 16  # rows per forward; small, so that the time limit is kept
VOCABULARY_ROWS = 128  # rows over which the probability of every word is averaged
TOP = 10
DEV = 0.7  # share of the time for the dev rows; the rest is for rows of train
TRAIN_ROWS = 1000  # at most, that the bias between the labels is found on
CANDIDATES = 50  # words of the model's own that are tried as label words
LOOKED_AT = 500  # of the most probable words, to find so many that can be label words
RARE = 1e-3  # probability of all label words together; below it the prompt does not ask for them
RARER = 100  # times less probable than the other label words
BIAS = 0.25  # a label's share of the predictions above its share of the rows
MARGIN = 0.05  # of the AUC above 0.5; more where few rows leave it uncertain
TELLS = 0.15  # two standard errors of chance; above it an AUC of a useful prompt and one of chance are not told apart
GAIN = 0.02  # of the AUC, for other words to be named


@dataclass
class DevScores:
    """Scores of some dev rows.

    Attributes:
        labels: [rows].
        scores: of the classes, or log-probabilities of the label words, [rows, labels].
        candidates: token ids of other words that can be label words.
        candidate_scores: their log-probabilities, [rows, candidates].
        probability: mean probability of every word, [words]; None for an objective that scores no words.
    """

    labels: np.ndarray
    scores: np.ndarray
    candidates: list[int]
    candidate_scores: np.ndarray
    probability: np.ndarray | None


def check(prepared: Prepared, deadline: Deadline) -> Section:
    """Check the label words on as many dev rows as the time allows.

    Raises:
        UserError: when a score is not finite.
    """
    section, session = Section(TITLE), prepared.session
    seen = score_rows(session, prepared.dev, deadline.part(DEV))
    rows, all_rows = len(seen.labels), len(prepared.dev)
    if rows < all_rows:
        section.cut.append(f"{all_rows - rows:,} of {all_rows:,} dev rows")
    _judge_words(section, session, seen)
    starts_elsewhere = _start(session)
    if starts_elsewhere:
        section.ok("start", starts_elsewhere)
    judge_scores(section, session.config.task.labels, seen.scores, seen.labels, bool(starts_elsewhere))
    if not starts_elsewhere:
        name_removed_bias(section, seen, score_rows(session, limit(prepared.train, TRAIN_ROWS), deadline))
        _name_better_words(section, session, seen)
    return section


@torch.no_grad()
def score_rows(session: Session, rows: list[TokenizedExample], deadline: Deadline) -> DevScores:
    """Score dev rows in a random order that the seed draws, until all are scored or the time is up."""
    order = np.random.RandomState(session.config.seed).permutation(len(rows))
    columns = _label_columns(session)
    scores, labels, words, kept = [], [], [], []  # `words`: the first rows' whole vocabulary
    candidates: list[int] | None = None
    for batch, chosen in _batches(session, rows, order, deadline):
        vocabulary = session.objective.vocabulary_logits(batch)
        vocabulary = None if vocabulary is None else vocabulary.log_softmax(-1)
        own = vocabulary[:, columns] if vocabulary is not None and columns else session.objective.logits(batch)
        if not bool(own.isfinite().all()):
            raise not_finite_at_start(session.config)
        scores.append(own.cpu().numpy())
        labels += [rows[i].label for i in chosen]
        if vocabulary is None:
            continue
        if candidates is None:
            words.append(vocabulary.cpu())
            if sum(map(len, words)) >= VOCABULARY_ROWS:
                candidates = _usable_words(session, torch.cat(words))
        else:
            kept.append(vocabulary[:, candidates].cpu().numpy())
    probability, others = None, np.empty((len(labels), 0), dtype=np.float32)
    if words:
        first = torch.cat(words)
        candidates = _usable_words(session, first) if candidates is None else candidates
        probability = first.exp().mean(0).numpy()
        others = np.concatenate([first[:, candidates].numpy(), *kept])
    return DevScores(np.array(labels), np.concatenate(scores), candidates or [], others, probability)


def judge_scores(section: Section, names: list[str], scores: np.ndarray, labels: np.ndarray, untrained: bool) -> None:
    """Judge the balance of the predictions, and whether the scores tell the labels apart.

    Args:
        section: gets the findings.
        names: of the labels.
        scores: [rows, labels].
        labels: [rows].
        untrained: the scores are those of a part that is new, so nothing is expected of them.
    """
    if len(np.unique(labels)) < 2:
        text = f"no score can be judged: all of {len(labels):,} dev rows are labelled '{names[labels[0]]}'"
        section.add(UNKNOWN, "auc", text, "give dev rows of every label, or more --seconds")
        return
    _judge_balance(section, names, scores, labels, untrained)
    value, error = separation(scores, labels), chance_error(labels)
    needed = max(MARGIN, 2 * error)
    text = f"AUC {value:.2f} (0.5 is chance, +-{2 * error:.2f} for {len(labels):,} rows)"
    figures: dict[str, Any] = {"auc": value, "chance_error": error, "rows": len(labels)}
    if untrained:
        section.ok("auc", f"of these scores, before training: {text}", **figures)
    elif value >= 0.5 + needed:
        section.ok("auc", f"the score tells the labels apart: {text}", **figures)
    elif value <= 0.5 - needed:
        advice = "check that task.label_words are in the order of task.labels, and how the labels of the data are read"
        section.add(DOUBT, "auc", f"the score orders the labels the wrong way round: {text}", advice, **figures)
    elif 2 * error > TELLS:
        counts = np.bincount(labels, minlength=len(names))
        few = f"{counts.min():,} of '{names[int(counts.argmin())]}'"
        advice = "give more dev rows of every label, or more --seconds if dev has them"
        text = f"too few rows to tell whether the score tells the labels apart: {few}; {text}"
        section.add(UNKNOWN, "auc", text, advice, **figures)
    else:
        advice = "try other words (task.label_words) or another prompt (task.template): these say little about a row"
        section.add(DOUBT, "auc", f"the score hardly tells the labels apart: {text}", advice, **figures)


def _judge_balance(section: Section, names: list[str], scores: np.ndarray, labels: np.ndarray, untrained: bool) -> None:
    """Compare the share of each predicted label with its share of the rows."""
    rows, answers = len(labels), scores.argmax(axis=1)
    predicted, actual = (np.bincount(x, minlength=len(names)) / rows for x in (answers, labels))
    most = int((predicted - actual).argmax())
    accuracy = float((answers == labels).mean())
    biased = bool(predicted[most] - actual[most] > BIAS) and not untrained
    favoured = f"'{names[most]}'" if biased else "no label"
    text = (
        f"the untrained model favours {favoured}: of {rows:,} dev rows {percent(predicted[most])} are predicted"
        f" '{names[most]}' and {percent(actual[most])} labelled so; {percent(accuracy)} are right"
    )
    section.add(
        NOTE if biased else OK,
        "zero_shot_balance",
        text,
        "the first steps usually correct this; until then read accuracy together with the predicted shares",
        accuracy=accuracy,
        rows=rows,
        predicted=dict(zip(names, predicted.tolist(), strict=True)),
        actual=dict(zip(names, actual.tolist(), strict=True)),
    )


def _start(session: Session) -> str:
    """Return why nothing is expected of the scores before training; empty if the pretrained words score the labels."""
    if session.config.init == "linear_probe":
        return "init=linear_probe fits the output layer before the first step: this and the signal below are of before"
    if session.objective.model_kind.has_classifier and session.loaded.fresh:
        return "the classification head is new, drawn from the seed: its scores say nothing before training"
    return ""


def _label_columns(session: Session) -> list[int]:
    """Return the columns of the vocabulary that are the labels' scores; empty where a word has several tokens."""
    ids = [list(word) if isinstance(word, (list, tuple)) else [int(word)] for word in session.encoder.label_ids]
    return [word[0] for word in ids] if all(len(word) == 1 for word in ids) else []


def _batches(session: Session, rows: list[TokenizedExample], order: np.ndarray, deadline: Deadline) -> Iterator[tuple]:
    """Yield batches with their row numbers while a further one fits into the time; the first one always."""
    for start in range(0, len(rows), BATCH):
        before = deadline.left
        chosen = order[start : start + BATCH].tolist()
        yield session.batch([rows[i] for i in chosen]), chosen
        if not deadline.allows(before - deadline.left):
            return


def _usable_words(session: Session, log_probs: Tensor) -> list[int]:
    """Return the tokens of the most probable words that can be label words, the present ones left out.

    Args:
        session: has the encoder, which knows what a label word is.
        log_probs: of the whole vocabulary, [rows, words].
    """
    encoder, present = session.encoder, set(_label_columns(session))
    ranked = log_probs.exp().mean(0).topk(min(LOOKED_AT, log_probs.shape[1])).indices.tolist()
    usable: list[int] = []
    for token in ranked:
        word = str(encoder.tokenizer.decode([token])).strip()
        if token not in present and any(c.isalpha() for c in word) and encoder.word_id(word) == token:
            usable.append(token)
        if len(usable) == CANDIDATES:
            break
    return usable


def _show(session: Session, token: int) -> str:
    """Return a token as text in quotes, without the space that belongs to it."""
    text = str(session.encoder.tokenizer.decode([token]))
    return "'" + (text.strip() or text).replace("\n", "\\n") + "'"


def _judge_words(section: Section, session: Session, seen: DevScores) -> None:
    """Report the label words' tokens, and what the model itself writes at their place."""
    encoder, names = session.encoder, session.config.task.labels
    if not encoder.label_ids:
        section.ok("tokens", f"objective={session.config.objective.name} scores classes, not words")
        return
    tokens = [list(word) if isinstance(word, (list, tuple)) else [word] for word in encoder.label_ids]
    words = [
        f"{name} is {' '.join(_show(session, token) for token in ids)} (token {', '.join(map(str, ids))})"
        for name, ids in zip(names, tokens, strict=True)
    ]
    figures = dict(zip(names, tokens, strict=True))
    section.ok("tokens", "; ".join(words), tokens=figures)
    if seen.probability is None:
        return
    probability = seen.probability
    ranked = np.argsort(-probability)
    top = [(int(token), float(probability[token])) for token in ranked[:TOP]]
    rows = min(len(seen.labels), VOCABULARY_ROWS + BATCH)
    section.ok(
        "top_words",
        f"the model's own top {len(top)} words there (mean over {rows} dev rows): "
        + ", ".join(f"{_show(session, token)} {percent(p)}" for token, p in top),
        top=[{"token": token, "word": _show(session, token)[1:-1], "probability": p} for token, p in top],
        rows=rows,
    )
    first = [ids[0] for ids in tokens]
    share = float(probability[sorted(set(first))].sum())
    ranks = {name: int((probability > probability[token]).sum()) + 1 for name, token in zip(names, first, strict=True)}
    pairs = zip(first, ranks.values(), strict=True)
    shown = ", ".join(f"{_show(session, token)} is number {rank:,}" for token, rank in pairs)
    section.judge(
        "label_word_share",
        share < RARE,
        f"the label words have {percent(share)} of the probability there: of {len(probability):,} words {shown}",
        "the prompt does not ask for these words: choose words that the model itself writes there, or change"
        " task.template",
        share=share,
        ranks=ranks,
    )
    shown_words = [_show(session, token) for token in first]
    judge_rare_words(section, names, shown_words, probability[first].tolist())


def judge_rare_words(section: Section, names: list[str], words: list[str], probabilities: list[float]) -> None:
    """Doubt a label word that is a hundred times less probable than the median of the others.

    Args:
        section: gets the finding.
        names: of the labels.
        words: of the labels, as they are shown.
        probabilities: of the words, in the untrained model.
    """
    others = [float(np.median(probabilities[:i] + probabilities[i + 1 :])) for i in range(len(words))]
    rare = [i for i in range(len(words)) if probabilities[i] * RARER <= others[i]]
    each = ", ".join(f"{word} {percent(p)}" for word, p in zip(words, probabilities, strict=True))
    named = ", ".join(f"{words[i]} for '{names[i]}'" for i in rare)
    section.judge(
        "rare_label_words",
        bool(rare),
        f"far rarer than the other label words: {named} ({each})" if rare else f"no label word is far rarer: {each}",
        "the label of such a word is hardly ever predicted, and slow to learn: choose a word that the model writes"
        " there about as often as the others",
        probabilities=dict(zip(names, probabilities, strict=True)),
        rare=[names[i] for i in rare],
    )


def name_removed_bias(section: Section, seen: DevScores, train: DevScores) -> None:
    """Name the accuracy without the bias between the labels, so that nobody takes its removal for learning."""
    biases, rows = remove_bias(train.scores, train.labels), len(seen.labels)
    right = {name: int(((seen.scores + bias).argmax(axis=1) == seen.labels).sum()) for name, bias in biases.items()}
    shown = []
    for name, count in right.items():
        low, high = wilson(count, rows)
        shown.append(f"{100 * count / rows:.1f}% ({BASELINES[name]}; 95% interval {100 * low:.1f} to {100 * high:.1f})")
    section.ok(
        "removed_bias",
        f"with the bias between the labels removed, by {len(train.labels):,} train rows and without training, "
        f"{' and '.join(shown)} of {rows:,} dev rows are right: what training gives beyond that is learned",
        accuracy={name: count / rows for name, count in right.items()},
        rows=rows,
        train_rows=len(train.labels),
    )


def _name_better_words(section: Section, session: Session, seen: DevScores) -> None:
    """Name words of the model's own that separate the dev rows better, if there are any."""
    columns, names = _label_columns(session), session.config.task.labels
    if not seen.candidates or not columns or len(np.unique(seen.labels)) < 2:
        return
    now = separation(seen.scores, seen.labels)
    chosen, reached = choose_words(seen.scores, seen.candidate_scores, seen.labels)
    tried = f"{len(seen.candidates)} of the model's own words tried on {len(seen.labels):,} dev rows"
    if reached < now + GAIN:
        section.ok("other_words", f"no better label words among {tried} (dev only)", tried=len(seen.candidates))
        return
    tokens = [columns[i] if word < 0 else seen.candidates[word] for i, word in enumerate(chosen)]
    words = {
        name: str(session.encoder.tokenizer.decode([token])).strip() for name, token in zip(names, tokens, strict=True)
    }
    shown = ", ".join(f"'{word}' for {name}" for name, word in words.items())
    section.add(
        NOTE,
        "other_words",
        f"better on dev: {shown}: AUC {reached:.2f} in place of {now:.2f}, the best of {tried}",
        "they were chosen on dev, so their dev scores are too good: keep test rows apart if you take them",
        words=words,
        auc=reached,
        tried=len(seen.candidates),
        chosen_on="dev",
    )

"""Templates: what each spelling parses to, and every error line."""

import re

import pytest

from mezo_cli.errors import UserError
from mezo_cli.tasks.template import FILTERS, Literal, RowTemplate, Sentence, Special, parse_template

CLS, MASK, SEP = Special("cls"), Special("mask"), Special("sep+")


def parsed(text: str, *columns: str) -> tuple[object, ...]:
    return tuple(parse_template(text, list(columns or ("a", "b")), "t"))


@pytest.mark.parametrize(
    ("templates", "parts"),
    [
        (
            [f"{{a}} It was {mask}." for mask in ("{mask}", "[MASK]", "<mask>", "{ mask }")],
            (CLS, Sentence(0), Literal(" It was"), MASK, Literal("."), SEP),
        ),
        (
            [f"{{a}} {sep} {{b}}: {{mask}}" for sep in ("{sep}", "[SEP]", "</s>")],
            (CLS, Sentence(0), SEP, Sentence(1, (), True), Literal(":"), MASK, SEP),
        ),
        (["{a} {mask} {sep}\n", "{a} {mask}"], (CLS, Sentence(0), MASK, SEP)),
        (["{{{a}}} *_* {mask}"], (CLS, Literal("{"), Sentence(0), Literal("} *_*"), MASK, SEP)),
        (
            ["  {a}  is {b}  {mask} "],
            (CLS, Literal(" "), Sentence(0, (), True), Literal("  is"), Sentence(1, (), True), MASK, SEP),
        ),
    ],
)
def test_parts(templates: list[str], parts: tuple[object, ...]):
    assert [parsed(template) for template in templates] == [parts] * len(templates)


def test_filters_are_lm_bffs_letters():
    assert parsed("{a|lower_first|drop_last} {b | upper_first}{mask}") == parsed(
        "*cls**sentl-_0**+sentu_1**mask**sep+*"
    )
    assert rendered("lower_first|drop_last", "A") == ""
    assert rendered("strip|upper_first", "  éa ") == "Éa"


def rendered(filters: str, *texts: str) -> str:
    columns = dict(zip("abc", texts, strict=False))
    return RowTemplate(f"{{a|{filters}}}", "t").render(columns, "t")


FILTER_CASES = [  # filters, texts, result
    ("lower", ("The Büro",), "the büro"),
    ("end_with('?')", ("is it",), "is it?"),
    ("end_with('?')", ("is it?",), "is it?"),
    ("end_with('?') | upper_first", ("is iT? no",), "Is iT? no?"),
    ("drop_end('.')", ("It rained.",), "It rained"),
    ("drop_end('.')", ("It rained",), "It rained"),
    ("drop_end('.')", ("It rained..",), "It rained."),
    ("lower_first_word", ("The Man left",), "the Man left"),
    ("lower_first_word", ("TV was off",), "tv was off"),
    ("lower_first_word", ("I saw it",), "I saw it"),
    ("lower_first_word", ("I'm Here",), "i'm Here"),
    ("lower_first_word", ("I",), "I"),
    ("replace('@x', b)", ("@x and @x", "Ann, | (B)"), "Ann, | (B) and Ann, | (B)"),
    ("""replace("@h\\n", '- ')""", ("a\n@h\nb",), "a\n- b"),
    ("replace( ',' , '|' )|replace('|', '(')", ("a,b",), "a(b"),
]


@pytest.mark.parametrize(("filters", "texts", "result"), FILTER_CASES)
def test_filters_and_their_code_change_a_text(filters: str, texts: tuple[str, ...], result: str):
    assert rendered(filters, *texts) == result
    (sentence,) = RowTemplate(f"{{a|{filters}}}", "t").parts
    assert isinstance(sentence, Sentence)
    assert eval(sentence.write_code(["a", "b"]), dict(zip("ab", texts, strict=False))) == result


def test_choose_puts_a_word_for_the_value_of_a_column():
    choose = "choose('effect', 'so', 'cause', 'because')"
    assert (rendered(choose, "effect"), rendered(choose, "cause")) == ("so", "because")
    with pytest.raises(UserError, match=r"^t: filter 'choose' has no word for 'why', only for effect, cause$"):
        rendered(choose, "why")
    with pytest.raises(UserError, match=r"filter 'choose' is only for task.choice and task.generate"):
        parsed("{a|choose('x', 'y')} {mask}")


def test_every_filter_is_tested():
    names = {name for filters, _, _ in FILTER_CASES for name in re.findall(r"\w+", filters)}
    assert set(FILTERS) - names == {"drop_last", "lower_first", "strip", "choose"}  # the tests above


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{premise} It was great.", "has no masks; exactly one"),
        ("{premise} It was {mask}, <mask>.", "has 2 masks; exactly one"),
        ("*cls**sent_0*_It_was.*sep+*", "has no masks"),
        ("*cls**mask**sent_0**mask**sep+*", "has 2 masks"),
        ("It was {mask}.", "uses no column; write {column} for one of premise, hypothesis"),
        ("{premis} It was {mask}.", "unknown column 'premis' (did you mean 'premise'?); the columns are premise, hyp"),
        ("{} It was {mask}.", "unknown column ''"),
        ("{premise|lower_frst} {mask}.", "unknown filter 'lower_frst' (did you mean 'lower_first'?); allowed are drop"),
        ("{premise|replace('a')} {mask}.", "filter 'replace('a')' is written replace('OLD', 'NEW')"),
        ("{premise|end_with('?'} {mask}.", "filter 'end_with('?'' is written end_with('END')"),
        ("{premise|strip('x')} {mask}.", "filter 'strip('x')' is written strip"),
        ("{premise|replace('a', hypothesi)} {mask}.", "unknown column 'hypothesi' (did you mean 'hypothesis'?)"),
        ("{premise} was {mask|strip}.", "{mask} takes no filter, 'strip' was given"),
        ("{premise It was {mask}.", "unbalanced brace at character 1; a literal brace is written {{"),
        ("{premise} It was {mask}}.", "unbalanced brace at character 24; a literal brace is written }}"),
        ("[CLS] {premise} {mask}", "leave out [CLS], the start token comes by itself"),
        ("*cls**sent_0*_It_was*mask.*sep+*", "unbalanced stars"),
        ("*cls*sent_0*mask**sep+*", "'sent_0' is outside its stars; write *sent_0*"),
        ("*cls**sent0*_It_was*mask*.*sep+*", "unknown part 'sent0' (did you mean 'sent_0'?)"),
        ("*cls**sent_2*_It_was*mask*.*sep+*", "'sent_2' asks for text 2, but the columns are only premise, hypothesis"),
    ],
)
def test_template_errors(template: str, message: str):
    with pytest.raises(UserError) as error:
        parse_template(template, ["premise", "hypothesis"], "rte")
    assert message in str(error.value)
    assert "task 'rte'" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_template_needs_columns_and_none_is_called_mask():
    with pytest.raises(UserError, match="names no columns"):
        parse_template("{a} {mask}", [], "t")
    with pytest.raises(UserError, match="cannot be called 'mask'"):
        parse_template("{a} {mask}", ["a", "mask"], "t")

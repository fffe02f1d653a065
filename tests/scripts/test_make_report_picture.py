"""The picture of the report's page in README.md is of the page as it is."""

from PIL import Image

from tests.scripts.load import load_script


def test_the_picture_is_of_the_templates_as_they_are() -> None:
    script = load_script("make_report_picture")
    with Image.open(script.PICTURE) as picture:
        assert picture.size == script.SIZE
        assert picture.info["templates"] == script.digest(), "run scripts/make_report_picture.py"  # type: ignore[attr-defined]

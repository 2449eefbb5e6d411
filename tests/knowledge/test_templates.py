import pytest

from laserbatch.pipeline.errors import ConfigError
from laserbatch.pipeline.knowledge.templates import SHIPPED_TEMPLATES, load_template

MINIMAL = "name: mine\nversion: 2\nframework: kar\nside: item\nparser: free\ninstruction: Describe.\n"


def test_shipped_templates_load():
    names = {path.stem for path in SHIPPED_TEMPLATES.glob("*.yaml")}
    assert {"kar_user", "kar_item"} <= names
    for name in names:
        template = load_template(name)
        assert template.identity == f"{name}@{template.version}"


def test_a_folder_of_ones_own_comes_first(tmp_path):
    (tmp_path / "mine.yaml").write_text(MINIMAL)
    (tmp_path / "kar_item.yaml").write_text(MINIMAL.replace("mine", "kar_item"))
    assert load_template("mine", tmp_path).version == 2
    assert load_template("kar_item", str(tmp_path)).version == 2
    assert load_template("kar_user", tmp_path).side == "user"
    with pytest.raises(ConfigError, match="templates are: kar_item, kar_user, mine"):
        load_template("yours", tmp_path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (MINIMAL + "instrucion: x\n", r"instrucion: no such key; did you mean 'instruction'\?$"),
        (MINIMAL.replace("version: 2\n", ""), "version"),
        (MINIMAL + "history: {}\n", "history"),
        (MINIMAL + "attributes:\n", r"attributes: expected keys .*found nothing"),
        (MINIMAL.replace("free", "aspects"), "needs `factors`"),
        (MINIMAL.replace("2", "two"), r"version: .*\(found 'two'\)"),
        (MINIMAL + "attributes: {line: '{nonsense}'}\n", "nonsense"),
        (MINIMAL + "attributes: {line: '{value'}\n", "format string"),
        (MINIMAL.replace("mine", "other"), "calls itself"),
        ("a: [", "not YAML"),
    ],
)
def test_a_wrong_template_is_refused_by_name(tmp_path, text, said):
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(ConfigError, match=said) as caught:
        load_template("mine", tmp_path)
    assert "pydantic" not in str(caught.value)

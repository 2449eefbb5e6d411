"""Extensions in other packages are found by entry points; a missing one is refused by name."""

from importlib.metadata import EntryPoint

import pytest

from laserbatch.jobs import cli
from laserbatch.pipeline import plugins
from laserbatch.pipeline.decoding.drafters import drafter_from
from laserbatch.pipeline.decoding.drafters.drafter import Drafter
from laserbatch.pipeline.decoding.settings import DecodingSettings
from laserbatch.pipeline.plugins import UnknownPlugin, installed, load_plugin


class Nothing(Drafter):
    pass


@pytest.fixture
def entries(monkeypatch):
    """Entry points, as of installed packages."""
    added = []
    monkeypatch.setattr(plugins, "entry_points", lambda group: [entry for entry in added if entry.group == group])
    installed.cache_clear()
    yield added
    installed.cache_clear()


def brought(name: str, value: str, group: str = "laserbatch.drafters") -> EntryPoint:
    return EntryPoint(name, value, group)


def test_the_class_of_an_entry_point_drafts(entries):
    entries.append(brought("nothing", f"{__name__}:Nothing"))
    assert isinstance(drafter_from(DecodingSettings(drafters=("nothing",))), Nothing)


def test_an_unknown_name_is_refused_with_those_that_there_are(entries):
    entries.append(brought("nothing", f"{__name__}:Nothing"))
    with pytest.raises(ValueError, match=r"provides 'nothin'\. Did you mean 'nothing'\? There are: previous, .*pool"):
        DecodingSettings(drafters=("nothin",))


def test_without_any_package_the_core_has_its_own_drafters_and_rules(entries):
    assert DecodingSettings().plugin_drafters == () and not DecodingSettings().verifier_samples
    with pytest.raises(
        ValueError, match=r"provides 'typical'\. There are: greedy, top_k, probability, relaxed \(built in\) \["
    ):
        DecodingSettings(verifier="typical")


def test_a_package_that_cannot_be_imported_is_named_with_its_reason(entries):
    entries.append(brought("broken", "no_such_module:Thing"))
    with pytest.raises(UnknownPlugin, match=r"'broken' of .* cannot be loaded: No module named 'no_such"):
        load_plugin("drafters", "broken")


def test_another_object_than_a_drafter_or_a_verifier_is_refused(entries):
    entries += [brought("sum", "builtins:sum"), brought("rule", "builtins:sum", "laserbatch.verifiers")]
    with pytest.raises(ValueError, match=r"'sum' names .*; expected a Drafter class"):
        DecodingSettings(drafters=("sum",))
    with pytest.raises(ValueError, match=r"'rule' names .*; expected an instance of VerifierPlugin"):
        DecodingSettings(verifier="rule")


def test_two_packages_of_one_name_are_refused(entries):
    entries += [brought("nothing", f"{__name__}:Nothing"), brought("nothing", f"{__name__}:Drafter")]
    with pytest.raises(UnknownPlugin, match=r"both provide 'nothing'"):
        installed("drafters")


def test_two_packages_with_one_command_leave_the_others_working(entries, capsys):
    group = "laserbatch.commands"
    entries += [brought("mine", "a:b", group), brought("mine", "c:d", group)]
    assert list(cli._commands_of_plugins()) == []
    assert "the commands of other packages are left out" in capsys.readouterr().err

"""A config of one's own: every setting of its job exists, can be changed from the command line, is
listed, and is checked.
"""

from pathlib import Path

import pytest

from mint_jax import launch, recipes
from mint_jax.errors import UserError
from mint_jax.harness import settings
from mint_jax.recipes import reference

ROOT = Path(__file__).parents[2]
TEN_LINES = """
from ml_collections import ConfigDict

def get_config():
    config = ConfigDict()
    config.job = "sft"
    config.base = "tiny-random"
    config.steps = 4
    config.policies = ConfigDict({n: {"data": {"env": "digit_sum"}, "adapter": {"rank": 2}} for n in ("adder", "v2")})
    return config
"""  # noqa: E501


@pytest.fixture
def own(tmp_path):
    """Loads a config file of the user's own with changes, as ``launch`` does; the file's text can
    be given.
    """

    def load(*changes, text=TEN_LINES, name="own.py"):
        (tmp_path / name).write_text(text)
        return settings.build(*launch.load(str(tmp_path / name), launch.split(changes)[1]))

    return load


def test_what_a_file_leaves_out_has_its_default_and_can_be_set(own):
    config = own()
    assert (config.dtype, config.mesh.data, config.checkpoint.every) == ("float32", -1, 10)
    assert config.policies["adder"].seed is None, "derived, unless set"
    config = own(
        "--config.catalog=~/catalog",
        "--config.policies.adder.data.path=~/d.jsonl",
        "--config.policies.adder.optimizer.warmup_steps",
        "3",
        "--config.policies.adder.seed=7",
        "--config.policies.*.adapter.alpha=64",
        "--config.tensorboard=false",
        "--config.policies.v2.adapter.targets=('q', 'v')",
    )
    adder, other, home = config.policies["adder"], config.policies["v2"], Path.home()
    assert (config.catalog, adder.data.path) == (f"{home}/catalog", f"{home}/d.jsonl")
    assert (adder.optimizer.warmup_steps, other.optimizer.warmup_steps) == (3, 0)
    assert (adder.seed, config.tensorboard) == (7, False)
    assert [p.adapter.alpha for p in config.policies.values()] == [64.0, 64.0]
    assert isinstance(other.adapter.alpha, float)
    assert other.adapter.targets == ("q", "v")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("stepps=3", r"stepps is no setting: did you mean steps\?"),
        ("checkpoint.evry=3", r"checkpoint.evry is no setting: did you mean checkpoint.every\?"),
        ("steps.more=3", "steps is a value, not a section: set --config.steps=3"),
        ("checkpoint=3", "checkpoint is a section, not a value: .* it has every, keep"),
        ("steps=abc", "steps is 'abc'; expected a whole number, at least 1: set --config.steps"),
        ("steps=0", "steps is 0; expected a whole number, at least 1"),
        ("tensorboard=maybe", "tensorboard is 'maybe'; expected True or False"),
        ("policies.*.optimizer.learning_rate=fast", "learning_rate is 'fast'; expected a number"),
        ("policies.v2.optimizer.schedule=s", "v2.optimizer: schedule is 's'; choose one of"),
        ("policies.adder.adapter.targets=(1, 2)", r"targets is .*; expected a tuple of texts"),
    ],
)
def test_a_setting_that_is_misspelt_or_of_another_type_is_refused(own, change, says):
    with pytest.raises(UserError, match=says):
        own(f"--config.{change}")


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ('config.base = "tiny-random"', "pass", "base is not set .*, or set --config.base="),
        ('{"rank": 2}', "{}", "policies.adder.adapter: rank is 0; expected 1 to 1024"),
        ('config.job = "sft"', 'config.bench = "engine"', "'engine': run it by python -m bench"),
        ('{"rank": 2}', "2", "policies.adder.adapter is 2; expected a section"),
        ("return config", "return {}", "get_config of .* returned a dict"),
        ("def get_config", "def config", "has no function get_config"),
    ],
)
def test_a_file_with_a_mistake_is_refused(own, old, new, says):
    with pytest.raises(UserError, match=says):
        own(text=TEN_LINES.replace(old, new))


def test_an_argument_that_nobody_takes_is_refused(own, tmp_path):
    own()
    with pytest.raises(UserError, match="takes no argument: drop ':ci'"):
        launch.load(str(tmp_path / "own.py") + ":ci")
    with pytest.raises(UserError, match="quickstart size 'cii'"):
        launch.load(str(ROOT / "configs" / "quickstart.py") + ":cii")


@pytest.mark.parametrize("job", recipes.SETTINGS)
def test_every_setting_has_a_line(job):
    found = list(settings.describe(recipes.of_job(job), {}))
    assert [line.path for line in found if not line.help] == []


def test_help_lists_every_setting_with_its_present_value(capsys):
    launch.main([f"--config={ROOT / 'configs/sft/smollm2.py'}", "--config.seed=12", "--help"])
    text = capsys.readouterr().out
    for line in ("seed=12", "catalog=", "policies.bracket.optimizer.warmup_steps=2"):
        assert f"  --config.{line}\n" in text
    assert "--config.policies.adder.seed=\n" in text
    assert "--config.policies.adder.data.NAME=" in text
    assert "whole number, at least 1; updates of each policy" in text
    launch.main(["--help"])
    assert "--workdir" in capsys.readouterr().out


def test_the_page_of_all_settings_is_up_to_date():
    """``python -m mint_jax.recipes.reference > docs/settings.md`` makes it anew."""
    assert (ROOT / "docs" / "settings.md").read_text() == reference.page()
    assert "`policies.NAME.env.name` |  |" in reference.page(), "what must be given"

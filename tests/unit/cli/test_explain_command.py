"""`rollart explain` says what it lacks."""

from __future__ import annotations

import pytest

from rollart.cli.main import main


@pytest.mark.parametrize("command", ["explain", "train"])
def test_only_the_recipe_is_required(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command])
    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith("the following arguments are required: RECIPE_OR_FILE\n")


def test_a_recipe_is_enough(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "smoke", "--profile", "none"]) == 0
    assert capsys.readouterr().out

"""Own modules start whatever the working directory holds."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from service.child import module_command, module_environment


def test_a_folder_with_a_package_name_does_not_get_in_the_way(tmp_path: Path) -> None:
    for name in ("wadiloco", "service"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('the wrong one')")
    done = subprocess.run(
        [*module_command("wadiloco"), "--version"],
        cwd=tmp_path,
        env={**os.environ, **module_environment()},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("wadiloco ")

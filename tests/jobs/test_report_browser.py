"""The report in a real browser: no console output, and every section is visible."""

import re
import shutil
import subprocess

import pytest
from manifest_fixture import manifest_of, night_manifest

from laserbatch.jobs.report.page import write_report

BROWSER = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--enable-logging=stderr",
    "--v=0",
)
SECTIONS = ("work", "speed", "drafts", "ctr", "audit", "samples", "provenance")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="no chromium on PATH; install one to check the report in a browser"),
]


def browse(tmp_path, *arguments: str) -> subprocess.CompletedProcess:
    command = [BROWSER, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


def test_page_loads_complete_and_without_console_messages(tmp_path):
    write_report(manifest_of(night_manifest()), tmp_path / "report.html")
    done = browse(tmp_path, "--window-size=1440,900", "--dump-dom", (tmp_path / "report.html").as_uri())
    assert "CONSOLE" not in done.stderr
    for anchor in SECTIONS:
        assert re.search(rf'<section id="{anchor}">\s*<div class="heading">', done.stdout), anchor
    assert done.stdout.count('<div class="bars') == 3
    assert done.stdout.rstrip().endswith("</html>")


def test_hostile_titles_do_not_run(tmp_path):
    manifest = night_manifest()
    manifest["sides"]["user"]["samples"][0]["spans"] = [
        {
            "text": "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>",
            "source": "pool",
        }
    ]
    write_report(manifest_of(manifest), tmp_path / "report.html")
    done = browse(tmp_path, "--dump-dom", (tmp_path / "report.html").as_uri())
    assert "<title>Night of 1 March 2025" in done.stdout
    assert "<img" not in done.stdout and "<script" not in done.stdout


def test_page_prints_on_a_few_sheets(tmp_path):
    write_report(manifest_of(night_manifest()), tmp_path / "report.html")
    browse(tmp_path, f"--print-to-pdf={tmp_path / 'report.pdf'}", (tmp_path / "report.html").as_uri())
    printed = (tmp_path / "report.pdf").read_bytes()
    assert printed.startswith(b"%PDF")
    assert 4 <= len(re.findall(rb"/Type\s*/Page\b", printed)) <= 9

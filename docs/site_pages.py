"""For mkdocs: pages that lie outside docs/ become pages of the site."""

from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}


def on_files(files, config):
    for name, page in PAGES.items():
        text = (ROOT / name).read_text(encoding="utf-8").replace("](docs/", "](").replace("](LICENSE)", "](license.md)")
        for other, target in PAGES.items():
            text = text.replace(f"]({other}", f"]({target}")
        files.append(File.generated(config, page, content=text))
    licence = (ROOT / "LICENSE").read_text(encoding="utf-8")
    files.append(File.generated(config, "license.md", content=f"# License\n\n```text\n{licence}\n```\n"))
    return files

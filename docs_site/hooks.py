"""What mkdocs calls while it builds the site: see mkdocs' user guide on hooks."""

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from docs_site import devices_page
from docs_site.api_pages import api_pages
from docs_site.llms_text import llms_text, pages_of
from docs_site.moved import write_redirects
from docs_site.navigation import navigation
from docs_site.notebook_page import notebook_page
from docs_site.source_links import without_source_links

ASSETS = Path(__file__).parent / "assets"
MARKDOWN: dict[str, str] = {}
"""Of each page as the site has it, by its path; for llms.txt."""


def on_config(config: Any) -> Any:
    """The navigation, which docs/index.md lists, and the reference behind it."""
    MARKDOWN.clear()
    config.nav = [*navigation(Path(config.docs_dir)), {"Reference": [{page.title: page.path} for page in api_pages()]}]
    return config


def on_files(files: Files, *, config: Any) -> Files:
    """Pages and files that are not in docs/."""
    for page in api_pages():
        files.append(File.generated(config, page.path, content=page.markdown))
    files.append(File.generated(config, devices_page.PATH, content=devices_page.content()))
    for asset in sorted(ASSETS.iterdir()):
        files.append(File.generated(config, f"assets/{asset.name}", abs_src_path=str(asset)))
    for path in sorted(Path(config.docs_dir).rglob("*.ipynb")):
        markdown, pictures = notebook_page(path)
        folder = path.parent.relative_to(config.docs_dir).as_posix()
        files.append(File.generated(config, f"{folder}/{path.stem}.md", content=markdown))
        for name, content in pictures.items():
            files.append(File.generated(config, f"{folder}/{name}", content=content))
    return files


def on_nav(nav: Any, *, config: Any, files: Files) -> Any:
    """A link to the page of devices, which is no page of docs/."""
    found = devices_page.add_to_navigation(nav.items)
    assert found, f"docs/index.md lists {devices_page.BEHIND}"
    return nav


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Files) -> str:
    """Links that only the repository can follow; a notebook's page in place of the notebook."""
    text = without_source_links(markdown, page.file.src_uri, config.repo_url)
    if not page.file.generated_by:
        text = text.replace(".ipynb)", ".md)")
    MARKDOWN[page.file.src_uri] = text
    return devices_page.with_links(text, page.file.src_uri)


def on_post_build(*, config: Any) -> None:
    """The addresses that pages had before; `llms.txt`, and the Markdown of each page beside it."""
    folder = Path(config.site_dir)
    write_redirects(folder)
    for path, markdown in MARKDOWN.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(markdown, encoding="utf-8")
    sections = {
        title: pages_of(value) for entry in config.nav for title, value in entry.items() if not isinstance(value, str)
    }
    text = llms_text(config.site_name, config.site_description, sections, MARKDOWN)
    (folder / "llms.txt").write_text(text, encoding="utf-8")

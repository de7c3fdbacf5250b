"""Links within a built site that lead nowhere: to files, or to parts of a page, that are not there.

Call it with the folder of the site, such as docs/_build/html.
"""

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """Addresses that a page names, and the parts of it that have a name."""

    def __init__(self, path):
        super().__init__()
        self.links, self.parts = [], set()
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.links += [values[name] for name in ("href", "src") if values.get(name)]
        self.parts |= {values[name] for name in ("id", "name") if values.get(name)}


def find_dead(site):
    """(page, link) for each link within the site that leads nowhere."""
    pages = {path.resolve(): Page(path) for path in sorted(site.rglob("*.html"))}
    for path, page in pages.items():
        for link in page.links:
            scheme, host, name, _, part = urlsplit(link)
            if scheme or host:
                continue
            target = (path.parent / unquote(name)).resolve() if name else path
            target = target / "index.html" if target.is_dir() else target
            is_dead = not target.exists() or (part and target in pages and unquote(part) not in pages[target].parts)
            if is_dead:
                yield path.relative_to(site.resolve()), link


def main():
    site = Path(sys.argv[1])
    dead = list(find_dead(site))
    for page, link in dead:
        print(f"{page}: {link} leads nowhere")
    num_pages = len(list(site.rglob("*.html")))
    print(f"{num_pages} pages, {len(dead)} dead links")
    sys.exit(bool(dead) or num_pages == 0)


if __name__ == "__main__":
    main()

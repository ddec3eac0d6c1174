"""The console in a real browser, headless Chromium: ``make test-console`` runs it in an environment
of its own.

    python console_browser.py --server PYTHON [--chromium FILE] [--pictures FOLDER]

Every page is looked at in light, dark and narrow, by axe-core too (WCAG 2.1 A and AA: labels,
roles, contrast), with no error in the browser's console and nothing wider than the window. Then
what people do: sign in, search, promote and roll back, keys alone, charts, a policy whose name is a
script. Chromium is no Python package: Debian's ``chromium`` is looked for.
"""

import argparse
import contextlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect, sync_playwright

ROOT = Path(__file__).parents[2]
SIZES = {"light": (1280, 860), "dark": (1280, 860), "narrow": (390, 800)}
EVIL = "<img src=x onerror=alert(1)>'\"&{{7*7}}%2f?#"  # as tests/service/console_server.py has it
STARTED_S = 300.0


@contextlib.contextmanager
def server(python: str, base: str) -> Iterator[dict]:
    """What ``tests.service.console_server`` says, while it runs."""
    with tempfile.TemporaryDirectory() as folder:
        command = [python, "-m", "tests.service.console_server", folder, base]
        process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())
        finally:
            process.stdin.close()
            process.wait(60)


class Person:
    """A browser's window of somebody who has signed in."""

    def __init__(self, browser: Browser, told: dict, who: str, kind: str = "light"):
        width, height = SIZES[kind]
        theme = "dark" if kind == "dark" else "light"
        self.told, self.wrong = told, []
        window = {"color_scheme": theme, "viewport": {"width": width, "height": height}}
        self.page: Page = browser.new_context(**window).new_page()
        self.page.on("console", self._note)
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("dialog", lambda dialog: self.wrong.append(f"a script ran: {dialog.message}"))
        self.go("/console")
        self.page.get_by_label("API key").fill(told["keys"][who])
        self.page.get_by_role("main").get_by_role("button", name="Sign in").click()
        expect(self.page).to_have_url(re.compile("/console/policies"))

    def _note(self, message) -> None:
        if message.type in ("error", "warning"):
            self.wrong.append(message.text)

    def go(self, path: str) -> Page:
        self.page.goto(self.told["url"] + path)
        return self.page

    def check(self, what: str) -> None:
        """Nothing went wrong here, axe finds nothing, and the page is no wider than its window."""
        assert not self.wrong, f"{what}: {self.wrong}"
        rules = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"]}
        found = Axe().run(self.page, options=rules)
        assert found.violations_count == 0, f"{what}: {found.generate_report()}"
        wide, window = self.page.evaluate(
            "[document.documentElement.scrollWidth, document.documentElement.clientWidth]"
        )
        assert wide <= window, f"{what} is {wide} pixels wide in a window of {window}"


def looks(browser: Browser, told: dict, pictures: Path | None) -> None:
    """Every page in every form."""
    model = f"ann/{told['model']}"
    paths = {
        "policies": "/console/policies",
        "policy": "/console/policies/ann/chat",
        "model": f"/console/policies/{quote(model)}",
        "evil": f"/console/policies/ann/{quote(EVIL)}",
        "training": "/console/training",
        "costs": "/console/costs",
        "server": "/console/server",
        "missing": "/console/policies/nobody",
    }
    for kind in SIZES:
        person = Person(browser, told, "root", kind)
        for name, path in paths.items():
            page = person.go(path)
            if name == "missing":
                person.wrong = [text for text in person.wrong if "404" not in text]
            for plot in page.locator(".plot").all():
                expect(plot.locator("canvas")).to_be_visible()
            person.check(f"{name}, {kind}")
            if pictures is not None:
                page.screenshot(path=pictures / f"{name}-{kind}.png")
        print(f"{kind}: {len(paths)} pages", flush=True)


def moves(browser: Browser, told: dict) -> None:
    """Promotes and rolls back, with a reason and not without."""
    person = Person(browser, told, "ann")
    page = person.go("/console/policies/ann/chat")
    second = page.locator("input[name=revision][value='2']")
    form = page.locator("form[action*='/promote/']", has=second)
    page.locator("tr", has=form).locator("summary").click()
    form.get_by_role("button").click()
    assert page.url.endswith("/ann/chat"), "the browser wants a reason"
    form.get_by_label("Reason").fill(f"better on held-out {EVIL}")
    form.get_by_role("button").click()
    expect(page.get_by_role("status").first).to_contain_text("Promoted")
    serving = page.locator("tr", has=page.get_by_role("rowheader", name="serving", exact=True))
    expect(serving.locator("td").first).to_have_text("2")
    expect(page.locator("td.why").first).to_have_text(f"better on held-out {EVIL}")
    serving.locator("summary").click()
    serving.get_by_label("Reason").fill("it was not")
    serving.get_by_role("button").click()
    expect(page.get_by_role("status").first).to_contain_text("Rolled back")
    expect(serving.locator("td").first).to_have_text("3")
    person.check("after moves")
    print("moves", flush=True)


def with_keys_alone(browser: Browser, told: dict) -> None:
    """No mouse."""
    person = Person(browser, told, "root")
    page = person.go("/console/policies")
    page.keyboard.press("Tab")
    expect(page.locator(".skip")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("#main")).to_be_focused()
    for key, path in zip("sctp", ("server", "costs", "training", "policies")):
        page.keyboard.press("g")
        page.keyboard.press(key)
        expect(page).to_have_url(re.compile(f"/console/{path}$"))
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_be_hidden()
    page.get_by_role("button", name="Use the dark theme").press("Enter")
    background = "getComputedStyle(document.body).backgroundColor"
    assert page.evaluate(background) == "rgb(20, 23, 26)"
    page.reload()
    assert page.evaluate(background) == "rgb(20, 23, 26)", "the next page has it too"
    person.check("keys")
    print("keys", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server", required=True, help="the Python that has mint_jax")
    found = shutil.which("chromium") or shutil.which("chromium-browser")
    parser.add_argument("--chromium", default=found, help="its program")
    parser.add_argument("--base", default="tiny-random", help="what is served")
    parser.add_argument("--pictures", type=Path, help="folder for screenshots")
    given = parser.parse_args()
    if given.chromium is None:
        sys.exit("there is no chromium: install it (Debian: chromium), or name it by --chromium")
    if given.pictures is not None:
        given.pictures.mkdir(parents=True, exist_ok=True)
    with server(given.server, given.base) as told, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=given.chromium, args=["--no-sandbox"])
        looks(browser, told, given.pictures)
        moves(browser, told)
        with_keys_alone(browser, told)
        browser.close()


if __name__ == "__main__":
    main()

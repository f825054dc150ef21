"""The page in a real browser: sorted, filtered, hovered, opened by keyboard, dark, on a phone, and silent about errors.

Runs where Chromium, its driver and selenium are; set ``NDBENCH_SCREENSHOTS`` to a folder to keep the pictures.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("plotly", reason="the extra 'report' is not installed")
pytest.importorskip("selenium", reason="selenium is not installed")

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

from ndbench.report import html
from tests.compare.helpers import decide
from tests.report.html_runs import HOSTILE, LONG, crowded, failing, large

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
pytestmark = [
    pytest.mark.skipif(not (BROWSER and DRIVER), reason="Chromium or its driver is not installed"),
    pytest.mark.timeout(240),
]
DESKTOP, PHONE = (1280, 800), (390, 844)


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(argument)
    options.binary_location = str(BROWSER)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(str(DRIVER)))
    yield browser
    browser.quit()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    head, comparison = large()
    many, baseline, plan = crowded()
    judged = decide(many, baseline)
    judged.notes.extend(f"note {number}: " + "something else to know about the run " * 6 for number in range(8))
    page = html.render(judged, many, plan=plan, baseline=baseline, run_folder="results/runs/r")
    texts = {"failing": failing()[1], "large": html.render(comparison, head), "crowded": page}
    for name, text in texts.items():
        (folder / f"{name}.html").write_text(text, encoding="utf-8")
    return {name: folder / f"{name}.html" for name in texts}


@pytest.fixture
def opened(driver: Any, pages: dict[str, Path]) -> Iterator[Any]:
    """Opens a page at a size; in the end the console must have been silent."""

    def at(name: str, size: tuple[int, int] = DESKTOP) -> Any:
        metrics = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": size[0] < 500}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        driver.get(pages[name].as_uri())
        return driver

    yield at
    assert driver.get_log("browser") == []


def shown(driver: Any) -> list[str]:
    rows = "return [...document.querySelectorAll('tbody.cell')].filter(b => !b.hidden)"
    return list(driver.execute_script(f"{rows}.map(b => b.querySelector('.open').textContent)"))


def wait_drawn(driver: Any, selector: str) -> Any:
    place = driver.find_element(By.CSS_SELECTOR, selector)
    driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", place)
    WebDriverWait(driver, 60).until(lambda _: "drawn" in place.get_attribute("class").split())
    return place


def picture(driver: Any, name: str) -> None:
    folder = os.environ.get("NDBENCH_SCREENSHOTS")
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        driver.save_screenshot(f"{folder}/{name}.png")


@pytest.mark.parametrize("size", [DESKTOP, PHONE])
@pytest.mark.parametrize(("page", "cell"), [("failing", "fsdp8"), ("crowded", f"{LONG}-0")])
def test_the_first_screen_says_what_how_much_how_surely_since_when_and_how_to_see_it_again(
    opened: Any, size: tuple[int, int], page: str, cell: str
) -> None:
    driver = opened(page, size)
    picture(driver, f"{page}-{size[0]}-top")
    assert driver.execute_script("return window.scrollY") == 0
    row = driver.find_elements(By.CSS_SELECTOR, "#findings tbody tr")[0]
    for fact in (f"{cell} regressed", "tokens/s -", "95 % interval", "after session s00", f"cells={cell}"):
        assert fact in " ".join(row.text.split())
    place = row.rect
    assert place["y"] + place["height"] <= size[1], "without scrolling"
    assert place["x"] + place["width"] <= size[0]
    assert driver.find_element(By.CSS_SELECTOR, "h1").text.endswith("cells of hsdp_tp")
    assert driver.execute_script("return document.documentElement.scrollWidth") <= size[0]


@pytest.mark.parametrize("size", [DESKTOP, PHONE])
def test_the_page_is_no_wider_than_the_screen(opened: Any, size: tuple[int, int]) -> None:
    driver = opened("failing", size)
    for number in range(3):
        driver.execute_script("document.querySelectorAll('.open')[arguments[0]].click()", number)
    wait_drawn(driver, "#layouts .plot")
    assert driver.execute_script("return document.documentElement.scrollWidth") <= size[0]
    picture(driver, f"failing-{size[0]}-layouts")


def test_500_cells_are_sorted_and_filtered(opened: Any) -> None:
    driver = opened("large")
    assert len(shown(driver)) == 500
    head = driver.find_element(By.CSS_SELECTOR, "[data-sort='2']")
    head.click()
    speeds = "return [...document.querySelectorAll('tbody.cell')].map(b => Number(b.rows[0].cells[2].dataset.v))"
    up = driver.execute_script(speeds)
    assert up == sorted(up)
    head.click()
    assert driver.execute_script(speeds) == sorted(up, reverse=True)
    assert head.find_element(By.XPATH, "..").get_attribute("aria-sort") == "descending"
    box = driver.find_element(By.ID, "filter")
    box.send_keys("hsdp2x4 model_3")
    left = shown(driver)
    assert 0 < len(left) < 50
    assert all(name.startswith("hsdp2x4") for name in left)
    assert driver.find_element(By.ID, "count").text == f"{len(left)} of 500 cells"
    picture(driver, "large-1280-filtered")


def test_cells_without_a_figure_stay_last_and_verdicts_are_switched(opened: Any) -> None:
    driver = opened("failing")
    head = driver.find_element(By.CSS_SELECTOR, "[data-sort='2']")
    for _ in range(2):
        head.click()
        assert set(shown(driver)[-2:]) == {"tp8", "gone"}
    driver.find_element(By.CSS_SELECTOR, ".chip[data-verdict='missing']").click()
    assert "gone" not in shown(driver)


def test_a_point_tells_its_cell_when_hovered(opened: Any) -> None:
    driver = opened("failing")
    wait_drawn(driver, "[data-figure^='pareto']")
    point = driver.find_element(By.CSS_SELECTOR, "[data-figure^='pareto'] .scatterlayer .trace:nth-child(2) .point")
    box = driver.execute_script(
        "const b = arguments[0].getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]", point
    )
    driver.execute_cdp_cmd("Input.dispatchMouseEvent", {"type": "mouseMoved", "x": box[0] - 3, "y": box[1]})
    driver.execute_cdp_cmd("Input.dispatchMouseEvent", {"type": "mouseMoved", "x": box[0], "y": box[1]})
    found = WebDriverWait(driver, 10).until(lambda d: d.find_elements(By.CSS_SELECTOR, ".hoverlayer .hovertext"))
    assert "tokens/s a device" in found[0].text
    picture(driver, "failing-1280-hover")


def test_a_row_is_opened_and_a_column_sorted_by_keyboard(opened: Any) -> None:
    driver = opened("failing")
    button = driver.find_element(By.CSS_SELECTOR, ".open")
    button.send_keys(Keys.ENTER)
    assert button.get_attribute("aria-expanded") == "true"
    wait_drawn(driver, "[data-figure='steps-0']")
    wait_drawn(driver, "[data-figure='history-0']")
    picture(driver, "failing-1280-row")
    head = driver.find_element(By.CSS_SELECTOR, "[data-sort='0']")
    head.send_keys(Keys.SPACE)
    assert head.find_element(By.XPATH, "..").get_attribute("aria-sort") == "ascending"


def test_dark_mode_reaches_the_figures(opened: Any) -> None:
    driver = opened("failing")
    place = wait_drawn(driver, "[data-figure^='losses']")
    colour = "return [getComputedStyle(document.body).backgroundColor, arguments[0].layout.font.color]"
    light = driver.execute_script(colour, place)
    driver.execute_script("window.scrollTo(0, 0)")
    driver.find_element(By.ID, "theme").click()
    WebDriverWait(driver, 10).until(lambda d: d.execute_script(colour, place)[1] != light[1])
    dark = driver.execute_script(colour, place)
    assert light[0] == "rgb(255, 255, 255)"
    assert dark[0] == "rgb(20, 22, 26)"
    wait_drawn(driver, "[data-figure^='losses']")
    picture(driver, "failing-1280-dark")


def test_the_readers_own_dark_setting_is_followed(opened: Any) -> None:
    driver = opened("failing", PHONE)
    driver.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
    )
    try:
        assert driver.execute_script("return getComputedStyle(document.body).backgroundColor") == "rgb(20, 22, 26)"
        picture(driver, "failing-390-dark")
    finally:
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_a_hostile_name_runs_nothing_and_reads_as_it_is(opened: Any) -> None:
    driver = opened("failing")
    for number in range(len(shown(driver))):
        driver.execute_script("document.querySelectorAll('.open')[arguments[0]].click()", number)
    wait_drawn(driver, "[data-figure^='losses']")
    wait_drawn(driver, "[data-figure^='collectives']")
    assert driver.execute_script("return window.hacked === undefined")
    assert HOSTILE in shown(driver)
    labels = driver.execute_script(
        "return [...document.querySelectorAll('[data-figure^=collectives] .ytick')].map(t => t.textContent)"
    )
    assert HOSTILE in labels


def test_every_figure_of_a_large_page_is_drawn(opened: Any) -> None:
    driver = opened("large", PHONE)
    figures = driver.execute_script(
        "return [...document.querySelectorAll('#layouts .plot')].map(p => p.dataset.figure)"
    )
    assert len(figures) == 30
    assert {name.split("-")[0] for name in figures} == {"pareto", "losses", "collectives"}
    marks = "return arguments[0].querySelectorAll('.main-svg .trace path, .main-svg .trace .point').length"
    for name in figures[:6]:
        place = wait_drawn(driver, f"[data-figure='{name}']")
        assert driver.execute_script(marks, place) > 0, f"{name} holds lines, points or bars"
        assert place.rect["width"] <= PHONE[0]
    undrawn = driver.execute_script("return document.querySelectorAll('#layouts .plot:not(.drawn)').length")
    assert undrawn > 0, "the others wait until they come into view"
    picture(driver, "large-390-layouts")

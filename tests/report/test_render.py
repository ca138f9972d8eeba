"""The page as a file: it parses, loads nothing, runs nothing of a study's, stays small."""

import base64
import json
import re
import time
import zlib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from tests.ir.plain import new_store
from tests.ir.test_query import fill
from tests.report.studies import ATTACKS, hostile_study, small_study

from kernelbraid.ir import survey
from kernelbraid.ir.exchange import export_study, import_study
from kernelbraid.ir.store import Store
from kernelbraid.report import deltas, render

VOID = {"meta", "br", "input", "img", "link", "hr"}
MOST_BYTES_WITHOUT_DATA = 1 << 20


class Reader(HTMLParser):
    """Reads a page strictly: every element is closed, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.raw: dict[str, str] = {}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("script", "style"):
            name = self.tags[-1][1].get("id") or self.open[-1]
            self.raw[name] = self.raw.get(name, "") + data
        else:
            self.text.append(data)


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    reader.close()
    assert reader.open == []
    return reader


def written(store: Store, folder: Path) -> str:
    path = folder / "report.html"
    told = render.write(store, path)
    assert told["bytes"] == path.stat().st_size
    return path.read_text()


def inflated(reader: Reader, name: str) -> Any:
    return json.loads(zlib.decompress(base64.b64decode(reader.raw[name])))


def test_the_page_parses_and_holds_the_study(tmp_path: Path) -> None:
    store, shas = small_study(tmp_path / "s")
    reader = read(written(store, tmp_path))
    data = inflated(reader, "data")
    assert [node["sha256"] for node in data["nodes"]] == list(
        dict.fromkeys(n for n, _ in survey.sources(store))
    )
    assert data["nodes"][data["incumbent"]]["sha256"] == shas["best"]
    packed = [(parent, stored) for parent, stored in inflated(reader, "sources")]
    assert deltas.unpack(packed) == [text for _, text in survey.sources(store)]
    best = data["nodes"][data["incumbent"]]
    assert best["change"]["edit"] == {"knobs": {"BLOCK": 65}}
    assert best["change"]["requirements_at_risk"] == ["toy/1/batch/decode"]
    assert best["promotions"][0]["granted"] and best["decisions"][0]["decision"] == "continue"
    shown = "".join(reader.text)
    for words in ("Tokens are unknown. 2 proposer calls", "another day", "it ended crashed", "both at once"):
        assert words in shown or words in json.dumps(data)
    assert "it ended crashed" in shown and "both at once" in shown and "a CPU" in shown


def test_ids_are_unique_and_links_lead_somewhere(tmp_path: Path) -> None:
    store, _ = small_study(tmp_path / "s")
    reader = read(written(store, tmp_path))
    ids = [attributes["id"] for _, attributes in reader.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    links = {attributes["href"] for tag, attributes in reader.tags if tag == "a"}
    assert links and all(link is not None and link[0] == "#" and link[1:] in ids for link in links)


def test_nothing_is_loaded(tmp_path: Path) -> None:
    store, _ = small_study(tmp_path / "s")
    text = written(store, tmp_path)
    assert "://" not in text and "@import" not in text and "url(" not in text
    assert not re.search(r"\b(fetch|XMLHttpRequest|WebSocket|importScripts|eval|innerHTML)\b", text)
    for _, attributes in read(text).tags:
        assert not {"src", "srcset", "action", "data", "background", "xlink:href"} & attributes.keys()
        assert not [name for name in attributes if name.startswith("on") or name == "style"]


@pytest.mark.parametrize("attack", range(len(ATTACKS)))
def test_texts_of_a_study_stay_texts(tmp_path: Path, attack: int) -> None:
    with hostile_study(tmp_path / "s") as store:
        text = written(store, tmp_path)
    reader = read(text)
    assert [tag for tag, _ in reader.tags].count("script") == 3
    assert not [tag for tag, _ in reader.tags if tag in ("img", "iframe", "object", "embed", "b")]
    assert ATTACKS[attack] in "".join(reader.text)
    assert "1337" not in "".join(reader.text)
    policy = next(a["content"] for t, a in reader.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None and policy.startswith("default-src 'none'")
    for name, kind in (("script", "script-src"), ("style", "style-src")):
        assert f"{kind} '{render._csp_hash(reader.raw[name])}'" in policy


def test_equal_studies_have_equal_pages(tmp_path: Path) -> None:
    store, _ = small_study(tmp_path / "s")
    export_study(store, tmp_path / "study.jsonl")
    with import_study(tmp_path / "study.jsonl", tmp_path / "copy") as copy:
        assert written(copy, tmp_path) == written(store, tmp_path) == written(store, tmp_path)


def test_a_new_study_has_a_small_page(tmp_path: Path) -> None:
    with new_store(tmp_path / "s") as store:
        text = written(store, tmp_path)
    read(text)
    assert len(text) < 64 * 1024


def test_bad_places_are_refused(tmp_path: Path) -> None:
    with new_store(tmp_path / "s") as store:
        with pytest.raises(ValueError, match="is a folder"):
            render.write(store, tmp_path)
        with pytest.raises(ValueError, match="there is no folder"):
            render.write(store, tmp_path / "nowhere" / "report.html")
        source = next((tmp_path / "s" / "sources").iterdir())
        source.write_text("changed")
        with pytest.raises(RuntimeError, match="was changed"):
            render.write(store, tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


@pytest.mark.slow
def test_a_large_study_has_its_page_in_seconds(tmp_path: Path) -> None:
    store = new_store(tmp_path / "s")
    fill(store, 5000)
    started = time.process_time()
    told = render.write(store, tmp_path / "report.html")
    assert time.process_time() - started < 4.0  # about 1.2 s alone
    assert told["nodes"] == 5001
    reader = read((tmp_path / "report.html").read_text())
    rows = sum(tag == "tr" and "id" in attributes for tag, attributes in reader.tags)
    assert rows == 5001
    held = len(reader.raw["data"]) + len(reader.raw["sources"]) + 200 * rows
    assert told["bytes"] < held + MOST_BYTES_WITHOUT_DATA

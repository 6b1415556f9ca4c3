"""What `--image` may name, and what is said of what it may not."""

from __future__ import annotations

import base64
import subprocess
import sys

import pytest

from trio_router.demo import pictures
from trio_router.demo.pictures import PUBLIC_ONLY, Picture, Watch, find_picture, sample_picture
from trio_router.engine.vision.pictures import decode_item
from trio_router.engine.vision.references import Reference
from trio_router.errors import BadRequest, ConfigError
from trio_router.offload import inline
from trio_router.testing.origin import Origin, film, picture


def complaint(given: str) -> str:
    with pytest.raises(ConfigError) as caught:
        find_picture(given)
    return caught.value.message


def content(found: Picture) -> tuple[str, bytes]:
    head, _, payload = found.url.partition(";base64,")
    return head, base64.b64decode(payload)


class TestFinding:
    def test_the_sample_is_a_picture_and_the_same_each_time(self):
        found = find_picture("sample")
        head, data = content(found)
        assert (found.source, head) == ("sample", "data:image/png")
        assert data == sample_picture() == sample_picture()
        seen = decode_item(data, kind="image")
        assert (seen.width, seen.height) == (640, 480)

    @pytest.mark.parametrize(("data", "kind"), [(picture("red"), "png"), (film("red", "blue"), "gif")])
    def test_a_file_becomes_a_data_url_of_its_own_kind_whatever_its_name(self, tmp_path, data, kind):
        file = tmp_path / "picture.jpg"
        file.write_bytes(data)
        assert content(find_picture(str(file))) == (f"data:image/{kind}", data)

    def test_a_file_named_as_the_word_is_found_by_its_path(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "sample").write_bytes(picture("red"))
        assert content(find_picture("./sample"))[1] == picture("red")

    def test_a_url_is_left_as_it_is(self):
        url = "https://example.org/a.png?b=c"
        assert find_picture(url) == Picture(source=url, url=url)

    def test_private_hosts_are_taken_where_they_are_allowed(self):
        url = "http://127.0.0.1:8000/a.png"
        assert find_picture(url, allow_private_hosts=True).url == url

    def test_a_picture_does_not_spill_into_logs(self):
        assert len(repr(find_picture("sample"))) < 100


class TestComplaints:
    def test_no_such_file_and_no_file_at_all(self, tmp_path):
        assert complaint("/no/such.png") == "--image: /no/such.png: No such file or directory"
        assert complaint(str(tmp_path)) == f"--image: {tmp_path}: Is a directory"
        assert complaint("a\0b") == "--image: a\0b: no path"

    def test_a_long_name_is_cut(self):
        assert len(complaint("x" * 5000)) < 130

    def test_what_is_no_picture(self, tmp_path):
        file = tmp_path / "a.png"
        file.write_text("hello")
        assert complaint(str(file)).startswith(f"--image: {file} is no picture that workers can read: image cannot be")

    def test_a_file_that_workers_would_not_take(self, tmp_path, monkeypatch):
        file = tmp_path / "a.png"
        file.write_bytes(picture("red"))
        monkeypatch.setattr(pictures, "MAX_BYTES", 10)
        assert complaint(str(file)) == f"--image: {file} has more than the 10 bytes that workers take"

    @pytest.mark.parametrize("url", ["ftp://x/a.png", "file:///a.png", "data:image/png;base64,AAAA"])
    def test_other_schemes(self, url):
        scheme = url.partition(":")[0]
        wanted = f"--image: {scheme}: URLs are not taken; give a file, an http or https URL, or sample"
        assert complaint(url) == wanted

    @pytest.mark.parametrize("host", ["127.0.0.1:8000", "localhost", "[::1]", "10.1.2.3", "box.local"])
    def test_hosts_that_the_router_refuses_come_with_what_to_do(self, host):
        assert complaint(f"http://{host}/a.png") == PUBLIC_ONLY

    @pytest.mark.parametrize("url", ["http://", "http://a:b@c/d", "http://1.2.3/a", "HTTP://x:0/"])
    def test_malformed_urls(self, url):
        assert complaint(url).startswith("--image: its URL has ")


class TestWatching:
    async def test_sizes_are_noted_and_bytes_handed_on(self):
        origin = Origin({"http://x/a": picture("red", size=(30, 20))})
        sizes: list[tuple[int, int]] = []
        watch = Watch(origin, offload=inline, note=sizes.append)
        reference = Reference(kind="image", scheme="http", url="http://x/a")
        assert await watch(reference) == picture("red", size=(30, 20))
        assert sizes == [(30, 20)]

    async def test_what_is_no_picture_has_no_size(self):
        sizes: list[tuple[int, int]] = []
        watch = Watch(Origin({"http://x/a": b"hello"}), offload=inline, note=sizes.append)
        with pytest.raises(BadRequest, match="cannot be decoded"):
            await watch(Reference(kind="image", scheme="http", url="http://x/a"))
        assert sizes == []


def test_without_a_picture_nobody_pays_for_pillow():
    code = "import sys, trio_router.cli; from trio_router.demo import run; print('PIL' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False\n"

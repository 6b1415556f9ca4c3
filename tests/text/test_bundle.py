"""Tokenizer archives: packed the same every time, and unpacked without believing a word of their headers."""

from __future__ import annotations

import hashlib
import io
import struct
import zipfile
from pathlib import Path

import pytest
from grpclib.const import Status
from hypothesis import given
from hypothesis import strategies as st

from trio_router.text import bundle
from trio_router.text.bundle import BadBundle, TokenizerFiles, pack, read_directory, unpack


def digest(archive: bytes) -> str:
    return hashlib.sha256(archive).hexdigest()


def make_zip(entries: list[tuple[str, bytes]], *, compression: int = zipfile.ZIP_DEFLATED) -> bytes:
    output = io.BytesIO()
    with zipfile.ZipFile(output, "w", compression) as archive:
        for name, content in entries:
            archive.writestr(zipfile.ZipInfo(name), content, compress_type=compression)
    return output.getvalue()


def open_bundle(archive: bytes) -> TokenizerFiles:
    return unpack(archive, sha256=digest(archive))


def refuse(archive: bytes, *, match: str) -> BadBundle:
    with pytest.raises(BadBundle, match=match) as caught:
        open_bundle(archive)
    return caught.value


@pytest.fixture
def model(tmp_path: Path) -> Path:
    names = (
        *("b.model", "zz.jinja", "chat_template.jinja", "o200k.tiktoken", "vocab.json", "config.json"),
        *("tokenizer_config.json", "tokenizer.json", "tokenizer.model", "model.safetensors", "README.md"),
    )
    for name in names:
        (tmp_path / name).write_text(f"content of {name}")
    (tmp_path / "folder.model").mkdir()
    return tmp_path


class TestPacking:
    def test_known_files_come_in_the_wire_order_then_the_patterns(self, model: Path):
        assert list(read_directory(model).contents) == [
            *("tokenizer.json", "tokenizer_config.json", "config.json", "vocab.json", "tokenizer.model"),
            *("o200k.tiktoken", "chat_template.jinja", "zz.jinja", "b.model"),
        ]

    def test_packing_and_unpacking_returns_the_files_in_their_order(self, model: Path):
        archive = pack(model)
        assert list(open_bundle(archive).contents.items()) == list(read_directory(model).contents.items())

    def test_equal_files_make_equal_bytes_whenever_they_were_written(self, model: Path, tmp_path: Path):
        twin = tmp_path / "twin"
        twin.mkdir()
        for path in sorted(model.glob("*.*"), reverse=True):
            if path.is_file():
                (twin / path.name).write_bytes(path.read_bytes())
                (twin / path.name).chmod(0o600)
        assert pack(twin) == pack(model)

    def test_a_directory_without_tokenizer_files_is_refused(self, tmp_path: Path):
        (tmp_path / "model.safetensors").write_bytes(b"weights")
        for function in (pack, read_directory):
            with pytest.raises(BadBundle, match="No tokenizer files found in"):
                function(tmp_path)

    def test_an_archive_is_a_plain_zip_for_others(self, model: Path):
        with zipfile.ZipFile(io.BytesIO(pack(model))) as archive:
            assert archive.testzip() is None
            assert archive.read("config.json") == b"content of config.json"


class TestHash:
    def test_another_hash_is_refused_with_both(self):
        archive = make_zip([("config.json", b"{}")])
        with pytest.raises(BadBundle, match=f"{digest(archive)}.*{'0' * 64}"):
            unpack(archive, sha256="0" * 64)

    @pytest.mark.parametrize("sha256", ["", "abc", "A" * 64, "g" * 64, "0" * 65])
    def test_what_is_no_hash_is_refused(self, sha256: str):
        with pytest.raises(BadBundle, match="64 lower-case hex digits"):
            unpack(make_zip([("config.json", b"{}")]), sha256=sha256)


class TestLimits:
    def test_packed_size(self, monkeypatch: pytest.MonkeyPatch):
        archive = make_zip([("config.json", b"{}")])
        monkeypatch.setattr(bundle, "MAX_PACKED_BYTES", len(archive))
        open_bundle(archive)
        monkeypatch.setattr(bundle, "MAX_PACKED_BYTES", len(archive) - 1)
        refuse(archive, match=rf"{len(archive)} bytes, the limit is {len(archive) - 1}")

    def test_number_of_entries(self):
        entries = [(f"{number}.model", b"") for number in range(51)]
        assert len(open_bundle(make_zip(entries[:50])).contents) == 50
        refuse(make_zip(entries), match="51 entries, the limit is 50")

    def test_a_huge_directory_is_refused_before_it_is_read(self, monkeypatch: pytest.MonkeyPatch):
        archive = make_zip([(f"{number}.model", b"") for number in range(2000)])
        monkeypatch.setattr(zipfile, "ZipFile", None)
        refuse(archive, match="directory has .* bytes, the limit is 51200")

    def test_unpacked_size_over_all_entries(self, monkeypatch: pytest.MonkeyPatch):
        archive = make_zip([("a.model", bytes(3_000_000)), ("b.model", bytes(3_000_000))])
        monkeypatch.setattr(bundle, "MAX_UNPACKED_BYTES", 6_000_000)
        open_bundle(archive)
        monkeypatch.setattr(bundle, "MAX_UNPACKED_BYTES", 5_999_999)
        refuse(archive, match="unpacks to more than 5999999 bytes")

    def test_the_limits_are_those_of_the_field(self):
        assert bundle.MAX_PACKED_BYTES == 200 * 2**20
        assert bundle.MAX_ENTRIES == 50
        assert bundle.MAX_UNPACKED_BYTES == 500 * 2**20

    @pytest.mark.parametrize("claimed", [0, 10, 2**31])
    def test_a_header_that_lies_about_the_size_is_not_believed(self, claimed: int):
        archive = bytearray(make_zip([("a.model", bytes(100_000))]))
        directory = archive.rfind(b"PK\x01\x02")
        struct.pack_into("<L", archive, directory + 24, claimed)
        struct.pack_into("<L", archive, 22, claimed)
        try:
            files = open_bundle(bytes(archive))
        except BadBundle:
            return
        # A size claimed too large is harmless: the data ends where it ends.
        assert files.contents["a.model"] == bytes(100_000)

    def test_zip64_is_refused(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(zipfile, "ZIP_FILECOUNT_LIMIT", 0)
        refuse(make_zip([("config.json", b"{}")]), match="ZIP64")


class TestEntries:
    @pytest.mark.parametrize(
        "name",
        [
            "../evil.json",
            "/etc/passwd",
            "a/b.json",
            "folder/",
            "..",
            ".",
            "a\\b.json",
            "C:evil",
            "bell\x07.json",
            "\u202etxt",
        ],
    )
    def test_a_name_that_is_not_flat_is_refused(self, name: str):
        refuse(make_zip([("config.json", b"{}"), (name, b"x")]), match="is not a plain file name")

    def test_a_name_cut_by_a_nul_is_refused(self):
        # zipfile itself cuts the name when writing, so it is put into the bytes.
        archive = make_zip([("config.jsonX", b"{}")]).replace(b"config.jsonX", b"config.json\0")
        refuse(archive, match="is not a plain file name")

    @pytest.mark.filterwarnings("ignore:Duplicate name")
    def test_a_name_given_twice_is_refused(self):
        refuse(make_zip([("config.json", b"{}"), ("config.json", b"[]")]), match="two entries named 'config.json'")

    @pytest.mark.parametrize("compression", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
    def test_other_compressions_are_refused(self, compression: int):
        archive = make_zip([("config.json", b"{}")], compression=compression)
        refuse(archive, match="neither stored nor deflated")

    def test_a_stored_entry_is_accepted(self):
        archive = make_zip([("config.json", b"{}")], compression=zipfile.ZIP_STORED)
        assert open_bundle(archive).contents == {"config.json": b"{}"}

    def test_an_encrypted_entry_is_refused(self):
        archive = bytearray(make_zip([("config.json", b"{}")]))
        for position in (6, archive.rfind(b"PK\x01\x02") + 8):
            archive[position] |= 1
        refuse(bytes(archive), match="is encrypted")

    def test_damaged_content_is_refused(self):
        archive = make_zip([("config.json", b"0123456789")], compression=zipfile.ZIP_STORED)
        refuse(archive.replace(b"0123456789", b"0123456780"), match="cannot be read: Bad CRC")

    def test_an_archive_of_nothing_is_refused(self):
        refuse(make_zip([]), match="has no files")

    @pytest.mark.parametrize("archive", [b"", b"PK", b"not a zip at all" * 100])
    def test_what_is_no_zip_is_refused(self, archive: bytes):
        error = refuse(archive, match="not a ZIP file")
        assert (error.error_code, error.http_status, error.grpc_status) == (
            "tokenizer_load_failed",
            503,
            Status.UNAVAILABLE,
        )


SAMPLE = make_zip([("tokenizer.json", b'{"model": {}}' * 20), ("config.json", b"{}")])


@given(
    position=st.integers(0, len(SAMPLE) - 1),
    replacement=st.binary(min_size=1, max_size=8),
    keep=st.integers(0, len(SAMPLE)),
)
def test_damage_anywhere_is_an_error_of_ours_or_none(position: int, replacement: bytes, keep: int):
    damaged = (SAMPLE[:position] + replacement + SAMPLE[position + len(replacement) :])[: max(keep, len(SAMPLE) // 2)]
    try:
        files = open_bundle(damaged)
    except BadBundle:
        return
    assert all(isinstance(content, bytes) for content in files.contents.values())


class TestReading:
    def test_a_missing_file_reads_as_empty(self):
        files = TokenizerFiles(contents={})
        assert files.json_object("config.json") == {}
        assert files.text("chat_template.jinja") is None

    @pytest.mark.parametrize("content", [b"", b"[1]", b"{", b"\xff", b"[" * 100_000])
    def test_what_is_no_json_object_is_named(self, content: bytes):
        with pytest.raises(BadBundle, match=r"config\.json is not a JSON object"):
            TokenizerFiles(contents={"config.json": content}).json_object("config.json")

    def test_text_that_is_not_utf8_is_named(self):
        with pytest.raises(BadBundle, match=r"chat_template\.jinja is not UTF-8"):
            TokenizerFiles(contents={"chat_template.jinja": b"\xff"}).text("chat_template.jinja")

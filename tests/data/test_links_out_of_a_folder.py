"""A file of a dataset's folder that is elsewhere is told."""

import logging

from lowtide.data.sources.load import load_rows


def test_a_link_out_of_the_folder_is_told(tmp_path, caplog):
    secret, folder = tmp_path / "secret.txt", tmp_path / "data"
    secret.write_text("a password")
    folder.mkdir()
    (folder / "train.txt").symlink_to(secret)
    with caplog.at_level(logging.WARNING):
        load_rows(folder)
    assert f"train.txt is a link to {secret}" in caplog.text


def test_hundreds_of_them_are_told_at_once(tmp_path, caplog):
    elsewhere, folder = tmp_path / "elsewhere", tmp_path / "data"
    elsewhere.mkdir()
    folder.mkdir()
    for number in range(300):
        (elsewhere / f"{number}.txt").write_text("words")
        (folder / f"{number}.txt").symlink_to(elsewhere / f"{number}.txt")
    with caplog.at_level(logging.WARNING):
        load_rows(folder)
    assert caplog.text.count("is a link to") == 1
    assert "and so are 299 more" in caplog.text


def test_a_snapshot_of_the_hubs_cache_is_not(tmp_path, caplog):
    blobs, folder = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    folder.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "123").write_text("words")
    (folder / "train.txt").symlink_to("../../blobs/123")
    with caplog.at_level(logging.WARNING):
        load_rows(folder)
    assert "is a link" not in caplog.text

"""What `lowtide.compat.datasets` takes from the inside of datasets is there."""

import subprocess
import sys

from datasets import Dataset, Features, Image, List

from lowtide.compat.datasets import fingerprint_of, stream_format, with_features


def test_a_fingerprint_names_rows_and_what_was_done_to_them():
    dataset = Dataset.from_dict({"a": [1, 2, 3]})
    one, same, other = dataset.select([0, 1]), dataset.select([0, 1]), dataset.select([1, 2])
    assert fingerprint_of(one) == fingerprint_of(same), "Dataset._fingerprint differs for the same rows"
    assert fingerprint_of(one) != fingerprint_of(other), "Dataset._fingerprint is equal for other rows"


def test_a_stream_says_its_format():
    stream = Dataset.from_dict({"a": [1]}).to_iterable_dataset()
    assert stream_format(stream) is None, "IterableDataset._formatting is set for plain objects"
    found = stream_format(stream.with_format("numpy"))
    assert found == "numpy", "IterableDataset._formatting.format_type is no longer the name of a format"


def test_rows_are_read_under_other_features_that_are_stored_alike():
    dataset = Dataset.from_dict({"a": [[{"bytes": b"x", "path": None}]]})
    other = with_features(dataset, Features({"a": List(Image(decode=False))}))
    assert other[0] == {"a": [{"bytes": b"x", "path": None}]}, "Dataset._info.features no longer says how rows are read"
    assert "Image" not in str(dataset.features)


STREAMS = """
import torch.utils.data
from datasets import Dataset
from lowtide.compat.datasets import without_torch

rows = Dataset.from_dict({"a": [1]})
with without_torch():
    found = isinstance(rows.to_iterable_dataset(), torch.utils.data.IterableDataset)
print(found, isinstance(rows.to_iterable_dataset(), torch.utils.data.IterableDataset))
"""


def test_streams_that_are_made_without_torch_are_torchs_where_it_is_there_already():
    """torch remembers what it once said of a class: of all streams of the process."""
    found = subprocess.run([sys.executable, "-c", STREAMS], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "True True"

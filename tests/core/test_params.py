from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.tiny import same_bits
from torch import Tensor, nn

from emdcfl.core import params
from emdcfl.core.errors import ModelError
from emdcfl.core.params import Average, Network, average, cosines, find_head, gram, make_layout, squared_distances, stacked


class Convolutional(nn.Module):
    """BatchNorm, a frozen layer, an integer constant, a non-persistent buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3)
        self.norm = nn.BatchNorm2d(3)
        self.frozen = nn.Linear(3, 5)
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(5, 2)
        self.register_buffer("table", torch.arange(4))
        self.register_buffer("scratch", torch.ones(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.frozen(self.norm(self.conv(x)).mean((2, 3))))


def rows(count: int, size: int = 1000, seed: int = 0) -> Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(seed))


def test_layout_gives_every_part_as_one_slice() -> None:
    module = Convolutional()
    layout = make_layout(module)
    names = lambda part: {e.name for e in layout.entries if part.start <= e.start and e.stop <= part.stop}  # noqa: E731
    trainable = {n for n, p in module.named_parameters() if p.requires_grad}
    assert names(layout.trainable) == trainable == {"conv.weight", "conv.bias", "norm.weight", "norm.bias", "head.weight", "head.bias"}
    assert names(layout.head) == {"head.weight", "head.bias"}
    statistics = {"norm.running_mean", "norm.running_var", "frozen.weight", "frozen.bias"}
    assert names(layout.embedding) == statistics | trainable - {"head.weight", "head.bias"}
    assert (layout.embedding.start, layout.embedding.stop, layout.head.stop) == (0, layout.head.start, layout.size)
    assert layout.size == sum(t.numel() for n, t in module.state_dict().items() if t.is_floating_point())
    assert layout.counters == ("norm.num_batches_tracked",)
    assert layout.embedding_width == 5
    assert layout.scope("P") == layout.trainable and layout.scope("H") == layout.head and layout.scope("F") == slice(0, layout.size)
    assert [e.start for e in layout.entries[1:]] == [e.stop for e in layout.entries[:-1]]


def test_layers_that_normalise_by_their_batch_are_noticed_whether_they_track_or_not() -> None:
    tail = nn.Linear(4, 2)
    for layer, expected in (
        (nn.BatchNorm1d(4), True),
        (nn.BatchNorm1d(4, track_running_stats=False), True),
        (nn.BatchNorm1d(4, affine=False, track_running_stats=False), True),
        (nn.InstanceNorm1d(4, track_running_stats=True), True),  # what it tracks is a mean over the batch
        (nn.InstanceNorm1d(4), False),
        (nn.LayerNorm(4), False),
        (nn.GroupNorm(2, 4), False),
    ):
        assert make_layout(nn.Sequential(nn.Linear(3, 4), layer, tail)).batch_statistics is expected


def test_theta_is_the_module_and_back() -> None:
    net = Network(Convolutional)
    theta = rows(1, net.layout.size)[0]
    net.load(theta)
    state = net.state_dict(theta)
    for e in net.layout.entries:
        assert same_bits(state[e.name].reshape(-1), theta[e.slice])
    other = Network(Convolutional)
    other.module.load_state_dict(state)
    assert same_bits(other.theta, theta)
    before = net.theta.clone()
    net.module.train()(torch.randn(4, 1, 6, 6))  # statistics move, and θ with them
    changed = (net.theta != before).nonzero().flatten()
    moved = [e for e in net.layout.entries if "running" in e.name]
    assert set(changed.tolist()) == {i for e in moved for i in range(e.start, e.stop)}


def test_loading_omega_leaves_the_head_alone() -> None:
    net = Network(Convolutional)
    theta = rows(1, net.layout.size)[0]
    head = net.theta[net.layout.head].clone()
    net.load(theta[net.layout.embedding])
    assert same_bits(net.theta[net.layout.embedding], theta[net.layout.embedding])
    assert same_bits(net.theta[net.layout.head], head)
    with pytest.raises(ModelError, match=rf"expected a state of {net.layout.size} .* got \(3,\)"):
        net.load(torch.zeros(3))


def test_integer_buffers_keep_value_and_dtype() -> None:
    net = Network(Convolutional)
    net.module.train()(torch.randn(4, 1, 6, 6))
    state = Network(Convolutional).state_dict(net.theta)
    assert state["table"].dtype == torch.int64 and state["table"].tolist() == [0, 1, 2, 3]
    assert state["norm.num_batches_tracked"].dtype == torch.int64 and state["norm.num_batches_tracked"].item() == 0
    assert "scratch" not in state


def test_gradients_land_in_one_vector() -> None:
    net = Network(Convolutional)
    x = torch.randn(4, 1, 6, 6)
    net.module(x).square().sum().backward()
    plain = Convolutional()
    plain.load_state_dict(net.state_dict(net.theta.clone()))
    plain.norm.num_batches_tracked.zero_()
    loss = plain(x).square().sum()
    loss.backward()
    start = net.layout.trainable.start
    for e in net.layout.entries:
        if e.trainable:
            torch.testing.assert_close(net.grad[e.start - start : e.stop - start].view(e.shape), plain.get_parameter(e.name).grad)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).relu())


class WithMethod(Plain):
    def embed(self, x: Tensor) -> Tensor:
        return self.body(x).relu()


class WithLayer(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.embed = self.body


@pytest.mark.parametrize("factory", [Plain, WithMethod, WithLayer])
def test_embedding_is_the_input_of_the_head_and_not_a_layer_called_embed(factory: type[Plain]) -> None:
    net, x = Network(factory), torch.randn(5, 4)
    assert same_bits(net.embed(x), net.module.body(x).relu())  # type: ignore[operator, union-attr]
    assert not net._head._forward_pre_hooks


def test_an_embedding_of_the_wrong_width_is_refused() -> None:
    class Wrong(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(3, 2)

        def embed(self, x: Tensor) -> Tensor:
            return x

        def forward(self, x: Tensor) -> Tensor:
            return self.head(x[:, :3])

    with pytest.raises(ModelError, match=r"expected embeddings of shape \(N, 3\), got \(5, 4\)"):
        Network(Wrong).embed(torch.randn(5, 4))


def test_tied_weights_inside_the_embedding_are_one_entry() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.head = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)
            self.b.weight = self.a.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.b(self.a(x)))

    net = Network(Tied)
    assert [e.name for e in net.layout.entries] == ["a.weight", "a.bias", "b.bias", "head.weight", "head.bias"]
    net.load(rows(1, net.layout.size)[0])
    assert net.module.b.weight.data_ptr() == net.module.a.weight.data_ptr()  # type: ignore[union-attr]
    state = net.state_dict(net.theta.clone())
    assert same_bits(state["a.weight"], state["b.weight"])


def tied_head() -> nn.Module:
    module = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    module[2].weight = module[0].weight
    return module


def without_parameters() -> nn.Module:
    module = nn.Sequential(nn.Linear(2, 2))
    module.requires_grad_(False)
    return module


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (lambda: nn.Sequential(nn.Linear(2, 2).double()), r"expected float32 tensors in the model, got '0.weight' in torch.float64"),
        (lambda: nn.Sequential(nn.BatchNorm1d(2, momentum=None), nn.Linear(2, 2)), r"BatchNorm '0' has momentum=None"),
        (lambda: nn.Sequential(nn.Conv2d(1, 1, 1)), "expected a network whose last layer is nn.Linear"),
        (tied_head, "the head shares a weight with '0'"),
        (without_parameters, "expected a network with trainable parameters"),
    ],
)
def test_what_a_flat_vector_cannot_carry_is_refused(factory: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        Network(factory)


def test_the_head_is_the_attribute_or_the_last_linear_layer() -> None:
    module = Convolutional()
    assert find_head(module) is module.head
    plain = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert find_head(plain) is plain[1]


def test_average_is_the_weighted_mean_with_statistics() -> None:
    theta = rows(3)
    weights = [1, 2, 5]
    mean = average(theta, weights)
    torch.testing.assert_close(mean.double(), (torch.tensor(weights, dtype=torch.float64) @ theta.double()) / 8, rtol=1e-7, atol=1e-9)
    net = Network(Convolutional)
    states = rows(2, net.layout.size).abs()
    merged = net.state_dict(average(states, [3, 1]))
    ours = [net.state_dict(s)["norm.running_var"] for s in states]
    torch.testing.assert_close(merged["norm.running_var"], 0.75 * ours[0] + 0.25 * ours[1])


@pytest.mark.parametrize("weight", [1, 3, 1437, 2**29 - 1])
def test_a_single_member_comes_back_bit_for_bit(weight: int) -> None:
    theta = rows(1)[0]
    theta[:4] = torch.tensor([-0.0, 1e-45, -3.4e38, 0.1])
    assert same_bits(average([theta], [weight]), theta)


@pytest.mark.parametrize("shape", [(1,), (2,), (3, 40), (4811,), (8192,)])
@pytest.mark.parametrize("weights", [[18.0] * 40, [3.0] * 130, [0.3] * 40, [2.0**30] * 10])
def test_many_states_at_once_have_the_bits_of_one_after_the_other(shape: tuple[int, ...], weights: list[float]) -> None:
    rng, half = torch.Generator().manual_seed(0), len(weights) // 2
    theta = torch.randn(half, *shape, generator=rng) * 10 ** torch.empty(half, *shape).uniform_(-18, 18, generator=rng)
    theta = torch.cat([theta, -theta[torch.randperm(half, generator=rng)]])  # what is left of it shows the order of the sum
    negative = theta.clone()
    negative[:, :1] = -0.0
    for states in (theta, negative):
        one = Average()
        for state, weight in zip(states, weights, strict=True):
            one.add(state, weight)
        together = Average().add_all(list(states), weights)
        split = Average().add_all(list(states[:9]), weights[:9]).add_all([state.clone() for state in states[9:]], weights[9:])
        assert same_bits(together.result(), one.result()) and same_bits(split.result(), one.result())
        assert together.total == one.total == split.total


def test_averaging_selects_members_so_that_a_nan_elsewhere_does_no_harm() -> None:
    theta = rows(3)
    theta[1] = torch.nan
    assert torch.isfinite(average([theta[0], theta[2]], [1, 1])).all()
    with pytest.raises(ValueError, match="expected a positive weight, got 0"):
        average(theta, [1, 0, 1])
    with pytest.raises(ValueError, match="at least one state"):
        Average().result()


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    theta, origin = rows(4), rows(1, seed=1)[0]
    whole, mean = gram(theta, slice(100, 900), origin=origin), average(theta, [1, 2, 3, 4])
    monkeypatch.setattr(params, "CHUNK", 7)
    monkeypatch.setattr(params, "PIECE", 7)
    monkeypatch.setattr(params, "WIDE", 3)
    torch.testing.assert_close(gram(theta, slice(100, 900), origin=origin), whole, rtol=1e-12, atol=1e-9)
    assert same_bits(average(theta, [1, 2, 3, 4]), mean)
    direct = (theta - origin)[:, 100:900].double()
    torch.testing.assert_close(gram(list(theta), slice(100, 900), origin=origin), direct @ direct.T, rtol=1e-5, atol=1e-4)


def test_gram_of_updates_with_an_origin_per_row() -> None:
    theta, origins = rows(3), rows(3, seed=1)
    difference = theta.double() - origins.double()
    torch.testing.assert_close(gram(theta, origin=origins), difference @ difference.T)
    torch.testing.assert_close(gram(theta, origin=list(origins)), difference @ difference.T)
    torch.testing.assert_close(gram(theta), theta.double() @ theta.double().T)


def test_cosines_and_distances_from_a_gram_matrix() -> None:
    theta = rows(3)
    theta[1] = 0.0
    g = gram(theta)
    cos = cosines(g)
    assert cos[1].tolist() == [0.0, 1.0, 0.0]
    assert cos[0, 2].item() == pytest.approx(torch.cosine_similarity(theta[0].double(), theta[2].double(), dim=0).item())
    torch.testing.assert_close(squared_distances(g).sqrt(), torch.cdist(theta.double(), theta.double()), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("channels", [1, 3])
def test_only_modules_that_say_so_get_images_with_channels_last(channels: int) -> None:
    class Careless(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = nn.Conv2d(channels, 4, 3), nn.Linear(4 * 16, 3)

        def forward(self, x: Tensor) -> Tensor:
            z = self.conv(x)
            out: Tensor = self.head(z.view(len(z), -1))  # of channels-last images there is no such view
            return out

    class Careful(Careless):
        channels_last = True

        def forward(self, x: Tensor) -> Tensor:
            assert x.stride() == (channels * 36, 1, channels * 6, channels)
            out: Tensor = self.head(self.conv(x).flatten(1))
            return out

    x, careless, careful = torch.randn(5, channels, 6, 6), Network(Careless), Network(Careful)
    careful.load(careless.theta)
    torch.testing.assert_close(careful(x), careless(x))
    torch.testing.assert_close(careful.embed(x), careless.embed(x))
    torch.testing.assert_close(careless(x), careless.module(x), rtol=0, atol=0)


def test_rows_of_one_matrix_are_stacked_without_a_copy_and_others_with_one() -> None:
    matrix = rows(5, 7)
    assert stacked(list(matrix[1:4])).data_ptr() == matrix[1].data_ptr()
    torn, columns = [matrix[1], matrix[2].clone(), matrix[3]], list(rows(7, 5).T)
    for states in (list(matrix[1:4]), list(matrix[[0, 2]]), [matrix[3], matrix[2]], [matrix[4], matrix[4]], torn, columns):
        assert same_bits(stacked(states), torch.stack(states))

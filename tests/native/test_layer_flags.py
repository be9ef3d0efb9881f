"""Flags of layers: raised when the last row is there, and not before, in any order of events."""

import random

import pytest

WAVES = (1, 2, 3, 16, 64)


def run(kvio, *, waves, items, layers, epochs, seed=0, **options):
    options = {"columns": layers, "most_steps": 3, **options}
    return kvio.run_loads(
        waves=waves, items_per_layer=items, layers=layers, epochs=epochs, seed=seed, **options
    )


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("waves", WAVES)
def test_a_flag_says_that_all_rows_are_there(kvio, waves, seed):
    """Loads follow each other without anything being reset between them."""
    rng = random.Random(f"{waves} {seed}")
    items, layers = rng.choice((1, 2, 5, 63, 64, 65, 130)), rng.randint(1, 6)
    first, more = rng.choice((0, 3)), rng.choice((0, 2))
    epochs = sorted(rng.sample(range(1, 1000), 4))
    raised, finished, moved, faults, wrong = run(
        kvio,
        waves=waves,
        items=items,
        layers=layers,
        columns=first + layers + more,
        first_layer=first,
        epochs=epochs,
        most_steps=rng.choice((1, 3, 40)),
        seed=seed,
    )
    assert wrong == []
    assert faults == []
    assert raised == [0] * first + [epochs[-1]] * layers + [0] * more
    assert finished == [0] * (first + layers + more)
    every = {(first + layer, item): 1 for layer in range(layers) for item in range(items)}
    assert moved == [every] * len(epochs)


def test_more_waves_than_items_of_all_layers(kvio):
    raised, finished, moved, faults, wrong = run(kvio, waves=64, items=3, layers=5, epochs=[1, 2])
    assert (raised, finished, faults, wrong) == ([2] * 5, [0] * 5, [], [])
    assert all(len(load) == 15 for load in moved)


@pytest.mark.parametrize("epochs", [[4, 4], [4, 3]])
def test_an_epoch_that_was_loaded_is_a_fault_and_takes_no_flag_back(kvio, epochs):
    raised, finished, _, faults, wrong = run(
        kvio, waves=4, items=9, layers=2, epochs=epochs, most_steps=9
    )
    # Waits for the second one see the first: that is what the fault is about.
    assert "a wait ended before all rows were there" in wrong
    assert raised == [4, 4]
    assert finished == [0, 0]
    assert faults == [(epochs[1], 5)] * 2


def test_a_wait_for_what_nobody_loads_gives_up(kvio):
    _, _, _, faults, wrong = run(
        kvio, waves=4, items=9, layers=2, epochs=[7], most_steps=0, timeout_ns=5000
    )
    assert faults == [(0, 7), (0, 7)]
    assert wrong == []

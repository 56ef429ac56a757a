"""docs/pictures/architecture.svg: the processes of a job, and the way of one gradient."""

from __future__ import annotations

from drawing import BLUE, FAINT, GREEN, ORANGE, Drawing

_WAY = (
    "Each gradient is copied into shared memory.",
    "The communication service (CS) adds local ranks.",
    "It pushes each partition to the server that sums it.",
    "The summation service (SS) adds all machines.",
    "The sum comes back to all machines.",
    "The CS writes it to its ranks; step() goes on.",
)


def svg() -> str:
    picture = Drawing(960, 530, "The processes of a job, and the way of one gradient")
    for number, left in enumerate((20, 620)):
        _gpu_machine(picture, left, number)
    for number, top in enumerate((20, 130)):
        picture.box((400, top, 160, 90), fill=GREEN)
        picture.text(480, top + 22, f"CPU machine {number}", anchor="middle")
        picture.box((430, top + 34, 100, 44), "SS")
    for cs, server in ((325, 430), (635, 530)):
        picture.arrow((cs, 76), (server, 76), both=True)
        picture.arrow((cs, 120), (server, 186), both=True)
    picture.arrow((277, 266), (277, 312), (683, 312), (683, 266), both=True)
    picture.text(480, 305, "TCP: each CS exchanges with each SS", 13, "middle", FAINT)
    picture.box((400, 340, 160, 50), "scheduler", fill=ORANGE)
    picture.arrow((180, 290), (180, 365), (400, 365), is_dashed=True)
    picture.arrow((780, 290), (780, 365), (560, 365), is_dashed=True)
    picture.text(290, 385, "gRPC: membership, no tensors", 13, "middle", FAINT)
    picture.text(670, 385, "one stream from each CS and SS", 13, "middle", FAINT)
    for number, place in enumerate(((177, 78), (308, 160), (375, 76), (520, 94), (585, 76), (783, 78)), start=1):
        picture.number(*place, number)
    for index, sentence in enumerate(_WAY):
        x, y = (40, 500)[index // 3], 440 + 36 * (index % 3)
        picture.number(x, y - 5, index + 1)
        picture.text(x + 22, y, sentence)
    return picture.svg()


def _gpu_machine(picture: Drawing, left: int, number: int) -> None:
    """The second one is the mirror image of the first."""

    def across(x: float, width: float = 0) -> float:
        return left + x if number == 0 else left + 320 - x - width

    picture.box((left, 20, 320, 270), fill=BLUE)
    picture.text(left + 160, 42, f"GPU machine {number}", anchor="middle")
    for index in range(2):
        picture.box((across(15, 90), 56 + 74 * index, 90, 44), f"rank {2 * number + index}")
        picture.arrow((across(105), 78 + 74 * index), (across(210), 78 + 74 * index), both=True)
    picture.text(across(157), 119, "shared memory", 11, "middle", FAINT)
    picture.box((across(210, 95), 56, 95, 118), "CS")
    picture.box((across(210, 95), 222, 95, 44), "SS")
    picture.arrow((across(257), 174), (across(257), 222), both=True)
    picture.text(across(205), 203, "shared memory", 11, "middle", FAINT)

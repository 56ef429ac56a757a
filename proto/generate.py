"""Regenerate what is generated from the .proto files (``make proto``)."""

import re
from pathlib import Path

from grpc_tools import protoc

HERE = Path(__file__).parent


def main() -> None:
    code = protoc.main(
        ["protoc", f"-I{HERE}", f"--python_out={HERE}", f"--pyi_out={HERE}", f"--grpc_python_out={HERE}",
         str(HERE / "control.proto")]
    )  # fmt: skip
    code = code or protoc.main(
        ["protoc", f"-I{HERE}", f"--python_out={HERE}", f"--pyi_out={HERE}", str(HERE / "journal.proto")]
    )
    if code:
        raise SystemExit(code)
    for name in ("control_pb2_grpc.py", "journal_pb2.py", "journal_pb2.pyi"):
        file = HERE / name  # protoc writes top-level imports; here they live in a package
        file.write_text(
            re.sub(r"^import (\w+_pb2) as", r"from byteps_py.proto import \1 as", file.read_text(), flags=re.M)
        )


if __name__ == "__main__":
    main()

"""Regenerate control_pb2.py, control_pb2.pyi and control_pb2_grpc.py from control.proto (``make proto``)."""

from pathlib import Path

from grpc_tools import protoc

HERE = Path(__file__).parent


def main() -> None:
    code = protoc.main(
        ["protoc", f"-I{HERE}", f"--python_out={HERE}", f"--pyi_out={HERE}", f"--grpc_python_out={HERE}",
         str(HERE / "control.proto")]
    )  # fmt: skip
    if code:
        raise SystemExit(code)
    stub = HERE / "control_pb2_grpc.py"  # protoc writes a top-level import; here it lives in a package
    stub.write_text(stub.read_text().replace("import control_pb2 as", "from byteps_py.proto import control_pb2 as"))


if __name__ == "__main__":
    main()

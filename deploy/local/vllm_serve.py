"""``vllm serve`` of the CPU wheel, whose own ``vllm`` command fails: it looks itself up under another package's name.

.venv-vllm/bin/python deploy/local/vllm_serve.py serve --model .local/tiny-llama --api-server-count 2
"""

from __future__ import annotations


def main() -> None:
    # Imported here: the API servers and engines that vLLM spawns import this module too.
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    command = ServeSubcommand()
    parser = FlexibleArgumentParser()
    command.subparser_init(parser.add_subparsers(dest="subparser", required=True))
    arguments = parser.parse_args()
    command.validate(arguments)
    command.cmd(arguments)


if __name__ == "__main__":
    main()

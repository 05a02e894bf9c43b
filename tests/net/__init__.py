# SPDX-License-Identifier: Apache-2.0
"""The core of the service without a kernel: what runs of real jobs told it, and what it decided.

tapes/NAME.tape.gz holds every input of one run in the order of arrival, tapes/NAME.decisions.gz
what the core made of them. test_net.py replays the tapes in one thread, under the tape's clock, and
compares. How a tape is made: record.py; its format: tape.py.
"""

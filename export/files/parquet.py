"""Tables in Parquet, by pyarrow."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow
import pyarrow.parquet

from ..errors import UsageError
from .rows import RecordFields, Row
from .shards import MAX_SHARD_BYTES, Shard

READ_ROWS = 16  # rows that are read together; a row may be long


@dataclass(frozen=True)
class Parquet:
    """The `FileFormat` of tables: the content of a shard is a table. Results are written as a
    column `output_field` after the others: a list of numbers of type `vector_type`, such
    as "float32", or if that is None a string, which is JSON unless the result is a text."""

    fields: RecordFields
    vector_type: str | None
    output_field: str

    def checked(self, path: Path) -> "Parquet":
        """Return this format if `path` is a table that it reads.

        Raises:
            ValueError: if the file is no table or damaged, and for two columns with one name.
            UsageError: for a table without the columns that the task reads, or with a column
                `output_field` already.
        """
        try:
            schema = pyarrow.parquet.read_schema(path)
        except pyarrow.ArrowInvalid as error:
            raise ValueError(f"{path} is not a complete Parquet file: {error}") from None
        doubles = [name for name, count in Counter(schema.names).items() if count > 1]
        if doubles:
            raise ValueError(
                f"{path} has several columns with the name {', '.join(doubles)}, expected one "
                "of each name"
            )
        if self.output_field in schema.names:
            problem = f"{path} has a column {self.output_field} already"
            raise UsageError(f"{problem}: expected another --output-field NAME for the results")
        if fault := self.fields.parse_record(sample_record(schema)).fault:
            raise UsageError(f"{path}: {fault}")
        return self

    def count(self, path: Path) -> int:
        return pyarrow.parquet.read_metadata(path).num_rows

    def shards(self, path: Path, size: int) -> Iterator[pyarrow.Table]:
        """Yield the rows in tables of at most `size`, fewer if they are as long as
        `MAX_SHARD_BYTES`. A table without rows gives one empty table. Raises ValueError for a
        damaged file."""
        try:
            with pyarrow.parquet.ParquetFile(path) as file:
                yield from split_rows(file.iter_batches(min(size, READ_ROWS)), size)
                if not file.metadata.num_rows:  # whose columns are to be there all the same
                    yield file.schema_arrow.empty_table()
        except (pyarrow.ArrowInvalid, OSError) as error:
            raise ValueError(f"{path} is not a complete Parquet file: {error}") from None

    def digest(self, content: pyarrow.Table) -> str:
        digest = hashlib.sha256()
        for batch in content.to_batches():
            digest.update(batch.serialize())
        return digest.hexdigest()

    def rows(self, content: pyarrow.Table) -> list[Row]:
        read = (
            [name for form in self.fields.forms for name in form]
            if self.fields.field is None
            else [self.fields.field]
        )
        names = content.schema.names
        columns = dict.fromkeys(name if name in names else name.partition(".")[0] for name in read)
        known = content.select([name for name in columns if name in names])
        return [self.fields.parse_record(record) for record in known.to_pylist()]

    def write(self, file: BinaryIO, shard: Shard, rows: list[Row], results: list[Any]) -> None:
        if self.vector_type is None:
            kind, results = pyarrow.string(), [*map(text_or_json, results)]
        else:
            kind = pyarrow.list_(pyarrow.type_for_alias(self.vector_type))
        table = shard.content.append_column(self.output_field, pyarrow.array(results, kind))
        pyarrow.parquet.write_table(table, file)

    def join(self, parts: Iterable[Path], file: BinaryIO) -> None:
        """Write a table to `file` whose row groups are the files `parts`, at least one."""
        tables = (pyarrow.parquet.read_table(part) for part in parts)
        first = next(tables)
        with pyarrow.parquet.ParquetWriter(file, first.schema) as writer:
            writer.write_table(first)
            for table in tables:
                writer.write_table(table)


def split_rows(batches: Iterable[pyarrow.RecordBatch], size: int) -> Iterator[pyarrow.Table]:
    """Yield tables of `size` rows. A table has fewer if it is the last, or as long as
    `MAX_SHARD_BYTES`."""
    content: list[pyarrow.RecordBatch] = []
    num_rows = num_bytes = 0
    for batch in batches:
        while len(batch):
            content.append(batch.slice(0, size - num_rows))
            batch = batch.slice(len(content[-1]))
            num_rows += len(content[-1])
            num_bytes += content[-1].nbytes
            if num_rows == size or num_bytes >= MAX_SHARD_BYTES:
                yield pyarrow.Table.from_batches(content)
                content, num_rows, num_bytes = [], 0, 0
    if content:
        yield pyarrow.Table.from_batches(content)


def text_or_json(result: Any) -> str | None:
    """Return a text or None unchanged, and any other result as JSON."""
    is_text = result is None or isinstance(result, str)
    return result if is_text else json.dumps(result, ensure_ascii=False)


def sample_record(fields: Iterable[pyarrow.Field]) -> dict[str, Any]:
    """Return a record with these fields, nested ones included, and a sample text in each."""
    return {
        field.name: sample_record(field.type) if pyarrow.types.is_struct(field.type) else "a"
        for field in fields
    }

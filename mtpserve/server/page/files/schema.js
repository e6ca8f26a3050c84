// A schema of the document in words. The document's own numbers are shown: JSON has larger ones than a browser reads exactly.
const PREFIX = "#/components/schemas/";
let schemas = {};  // by name

const named = (schema) => schema.$ref ? schemas[schema.$ref.replace(PREFIX, "")] : schema;
const forms = (schema) => schema.anyOf || schema.oneOf || [schema];
const isNull = (schema) => schema.type === "null";
const number = (value) => Number.isSafeInteger(value) || Math.abs(value) < 1e15 ? String(value) : "about " + value.toExponential(1);
const unique = (list) => [...new Set(list)].filter(Boolean);
// A field that is null is one that is not given: that each may be is said once.
const given = (schema) => schema.default === null ? forms(schema).filter((form) => !isNull(form)) : forms(schema);

function typeOf(schema) {
  if (schema.$ref) return schema.$ref.replace(PREFIX, "");
  const all = schema.default === undefined ? forms(schema) : given(schema);
  if (all[0] !== schema) return unique(all.map(typeOf)).join(" or ");
  if (schema.allOf && !schema.type) return unique(schema.allOf.map(typeOf))[0];
  const values = "const" in schema ? [schema.const] : schema.enum;
  if (!schema.type && values) return unique(values.map((value) => value === null ? "null" : typeof value)).join(" or ");
  if (schema.type === "array") return schema.items ? `array of ${typeOf(schema.items)}` : "array";
  const of = schema.additionalProperties;
  if (schema.type === "object" && of && of !== true && !schema.properties) return `object of ${typeOf(of)}`;
  return [schema.type || "anything"].flat().join(" or ");
}

function range(least, most, unit) {
  if (least === undefined && most === undefined) return "";
  if (most === undefined) return `at least ${least} ${unit}`;
  return least === undefined ? `at most ${most} ${unit}` : least === most ? `${least} ${unit}` : `${least} to ${most} ${unit}`;
}

function boundsOf(schema) {
  const all = given(schema);
  if (all[0] !== schema) return unique(all.map(boundsOf)).join("; ");
  const values = "const" in schema ? [schema.const] : schema.enum;
  if (values) return values.map((value) => JSON.stringify(value)).join(", ");
  const limits = [["≥ ", schema.minimum], ["> ", schema.exclusiveMinimum], ["≤ ", schema.maximum], ["< ", schema.exclusiveMaximum]];
  const each = schema.items ? boundsOf(schema.items) : typeof schema.additionalProperties === "object" ? boundsOf(schema.additionalProperties) : "";
  return unique([
    ...limits.filter(([, value]) => value !== undefined).map(([sign, value]) => sign + number(value)),
    range(schema.minLength, schema.maxLength, "characters"), range(schema.minItems, schema.maxItems, "items"),
    range(schema.minProperties, schema.maxProperties, "entries"), schema.pattern ? `matches ${schema.pattern}` : "", each && `each ${each}`,
  ]).join(", ");
}

// The objects in a schema, with what each is called.
function objects(schema) {
  const found = [];
  for (const form of schema.allOf && !schema.properties ? schema.allOf : forms(schema)) {
    const told = named(form);
    if (!told) continue;
    if (told.properties && (form.$ref || told.type)) found.push([form.$ref ? typeOf(form) : kindOf(told), told]);
    else if (told.items) found.push(...objects(told.items));
    else if (typeof told.additionalProperties === "object") found.push(...objects(told.additionalProperties));
    else if (told !== schema && (told.anyOf || told.oneOf || told.allOf)) found.push(...objects(told));
  }
  return found;
}
// Of an object without a name: the value of its `type`, by which its forms differ.
const kindOf = (schema) => "const" in (schema.properties.type || {}) ? `type ${JSON.stringify(schema.properties.type.const)}` : "fields";

// The first example among a schema's forms; undefined where none is given.
function exampleOf(schema) {
  for (const form of forms(schema)) {
    const told = named(form), found = told && (told.examples ? told.examples[0] : told === schema ? undefined : exampleOf(told));
    if (found !== undefined) return found;
  }
  return undefined;
}

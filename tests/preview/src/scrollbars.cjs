// @grafana/ui imports as the module's default what is one of its names. By its path, as the name
// itself is an alias of this file.
module.exports = require('../node_modules/react-custom-scrollbars-2/lib/index.js').Scrollbars;
